"""Rows in their publishers' layouts, pulled from a registry by their publishers' names, end to end.

The images are built here, of Debian packages: see `published` for what is real in them.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import read_run
from perdure.instances import instance_catalog
from perdure.instances.rows.row_conversion import to_instance
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.stage_services import Services
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import Outcome, RolloutRequest, RolloutStatus
from tests.images import debian, image_registry, published_images
from tests.images.podman_storage import Podman
from tests.images.published_images import Published

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / ".perdure/test-images"
BASE = "localhost/perdure-test/debian:1"
FOREIGN = ("PERDURE_", "TEMPORAL_", "OPENAI_", "ANTHROPIC_")
PLACES = "/testbed /app /r2e_tests /tmp /root /home"

pytestmark = pytest.mark.registry


@dataclass(frozen=True)
class Stand:
    """What runs the images, and where its images come from."""

    provider: str
    env: Mapping[str, str]
    rows: Path


@pytest.fixture(scope="module")
def hub(podman: Podman) -> Iterator[str]:
    """The address of a registry whose images are kept between runs."""
    if missing := debian.why_not() or published_images.why_not():
        pytest.skip(missing)
    with image_registry.serving(KEPT / "registry") as address:
        podman.trust([address])
        yield address


@pytest.fixture(scope="module")
def folder() -> Path:
    """`rows.jsonl`, `run_scripts/` and the images' contexts; a new one if their code changes."""
    code = Path(str(published_images.__file__)).read_bytes() + repr(debian.PACKAGES).encode()
    return KEPT / f"rows-{hashlib.sha256(code).hexdigest()[:12]}"


@pytest.fixture(scope="module")
def rows(podman: Podman, hub: str, folder: Path) -> list[Published]:
    """The images are in the registry and in no storage."""
    if made := published_images.made_before(folder):
        return made
    podman("import", "--quiet", str(debian.archive(KEPT)), BASE)
    made = published_images.all_of(BASE, folder)
    for one in made:
        name = one.image.replace("docker.io", hub)
        podman.build(name, one.context)
        podman("push", "--quiet", name)
    podman.clear()
    published_images.keep(folder, made)
    return made


@pytest.fixture
def stand(rows: list[Published], podman: Podman, hub: str, folder: Path) -> Stand:
    mirror = {"PERDURE_SANDBOX__IMAGE_MIRROR": f"docker.io={hub}"}
    return Stand("podman", {**podman.env, **mirror}, folder / "rows.jsonl")


@pytest.fixture
def perdure(stand: Stand, tmp_path: Path) -> Iterator["Perdure"]:
    made = Perdure(tmp_path / "home", stand.env)
    made("up")
    yield made
    made("down")


class Perdure:
    """Commands as a user types them."""

    def __init__(self, home: Path, env: Mapping[str, str]) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        self.store = home / "store"
        self.env = {**own, **env, "PERDURE_HOME": str(home)}

    def __call__(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "perdure.cli.main", *arguments]
        done = subprocess.run(
            command, env=self.env, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    async def run(self, agent: str, stand: Stand) -> list[Episode]:
        options = ("--agent", agent, "--sandbox", stand.provider, "-c", "2", "--new", "--wait")
        document: dict[str, Any] = json.loads(self("run", str(stand.rows), *options, "--json"))
        return await read_run(LocalStore(self.store), document["run_id"])


async def test_gold_is_one_and_nothing_is_zero(
    stand: Stand, perdure: Perdure, rows: list[Published]
) -> None:
    """Through the command line, on each row: the fix resolves it, no change does not, and every
    other test passes in both."""
    gold = await perdure.run("oracle", stand)
    nothing = await perdure.run("nop", stand)

    assert len(gold) == len(nothing) == len(rows)
    assert {(e.status, e.outcome) for e in gold} == {(RolloutStatus.GRADED, Outcome.RESOLVED)}
    assert {e.reward for e in gold} == {1.0}
    assert {(e.status, e.outcome) for e in nothing} == {(RolloutStatus.GRADED, Outcome.UNRESOLVED)}
    assert {e.reward for e in nothing} == {0.0}
    assert {e.rewards.p2p_fraction for e in [*gold, *nothing] if e.rewards} == {1.0}


@pytest.mark.parametrize("number", range(3), ids=["swe-bench", "pro", "r2e"])
async def test_agent_sees_neither_tests_nor_fix(
    stand: Stand,
    rows: list[Published],
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The image has them in its history or beside it. In the sandbox that the boot stage made, no
    object of git and no file has them, the log has the base only, and nothing looks changed."""
    for name, value in stand.env.items():
        monkeypatch.setenv(name, value)
    row = rows[number]
    services = Services(
        Settings(home=tmp_path / "home", store=str(tmp_path / "store")).changed(
            sandbox={"image_mirror": stand.env["PERDURE_SANDBOX__IMAGE_MIRROR"]}
        )
    )
    instance = to_instance(row.row, "published", 1, stand.rows.parent)
    await instance_catalog.save(services.store, instance)
    request = RolloutRequest(
        run_id="r", instance=instance.ref, sample_index=0, agent="nop", sandbox=stand.provider
    )
    await ActivityEnvironment().run(Stages(services).boot, Attempt(request=request, attempt=1))
    (info,) = await services.provider(stand.provider).list()
    async with await services.provider(stand.provider).attach(info.identity) as sandbox:
        done = await sandbox.exec(look_for(row), cwd=row.workdir, timeout=300)

    assert instance.environment.image in (row.image, row.image.removeprefix("docker.io/"))
    assert done.stdout.decode() == "base\n"


@pytest.mark.parametrize("number", range(3), ids=["swe-bench", "pro", "r2e"])
def test_image_itself_has_tests_and_fix(
    podman: Podman, rows: list[Published], hub: str, number: int
) -> None:
    """The same search finds both in the image: what the test above does not find was there."""
    row = rows[number]
    name = row.image.replace("docker.io", hub)
    options = ("--rm", "--network=none", "--ulimit", "nofile=20000:20000")
    found = podman(
        *("run", *options, "--ulimit", "nproc=32768:32768", name, "bash", "-c", look_for(row))
    )

    assert row.fix in found
    assert row.test in found


def look_for(row: Published) -> str:
    """Lines of git objects and files that have the fix or its test; then the log and the changes."""
    words = f"-e '{row.fix}' -e '{row.test}'"
    objects = f"git cat-file --batch-all-objects --batch --unordered | grep -ahF {words}"
    files = f"grep -rhaF --exclude-dir=.git {words} {PLACES} 2>/dev/null"
    return f"{objects}; {files}; git log --all --format=%s; git status -s"
