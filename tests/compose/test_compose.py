"""What docker-compose.yml promises, by what its containers do."""

import json

from tests import loop_agent
from tests.compose.stack import Compose
from tests.images.podman_storage import Podman
from tests.stack.made_instances import INSTANCE

NOBODYS_CAPABILITIES = "0000000000000000"
WHO = (
    "import os; print(os.getuid(), open('/proc/self/status').read().split('CapBnd:')[1].split()[0])"
)
IMPORTED = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
EXTRAS = (
    "boto3", "cryptography", "datasets", "daytona", "e2b", "kubernetes_asyncio", "matplotlib", "modal"
)  # fmt: skip


def test_its_services_give_graded_episodes(compose: Compose) -> None:
    """An agent calls the model through the gateway, in a bubblewrap sandbox of a container."""
    compose.run("python", "-m", "tests.compose.instance")
    said = compose.run("perdure", "run", INSTANCE, "-a", loop_agent.NAME, "-n", "2", "--json")

    rollouts = json.loads(said[said.index("{\n") :])["rollouts"]
    graded = [(one["status"], one["outcome"], one["reward"], one["attempts"]) for one in rollouts]
    assert graded == [("graded", "resolved", 1.0, 1)] * 2
    assert {one["episode"].partition("/runs/")[0] for one in rollouts} == {"s3://perdure"}


def test_no_service_of_ours_is_root_or_has_a_capability(compose: Compose, podman: Podman) -> None:
    """The workers that make sandboxes too."""
    running = [name for name in compose.started if name == "gateway" or name.startswith("worker-")]
    who = {podman("exec", compose.name(name), "python", "-c", WHO) for name in running}

    assert len(running) == 6
    assert who == {f"10001 {NOBODYS_CAPABILITIES}"}


def test_the_image_suits_the_chart(image: str, podman: Podman) -> None:
    """Its commands load as the chart runs them: a read-only disk, no capability; and every extra is there."""
    contained = ["--read-only", "--cap-drop", "ALL", "--user", "10001", "--network", "none"]
    podman(
        *("run", "--rm", *contained, "--security-opt", "no-new-privileges", image),
        *("python", "-c", IMPORTED, "workers.__main__", "perdure.gateway.__main__", *EXTRAS),
    )
