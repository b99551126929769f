"""Stages of a rollout whose repository is in its image: neither agent nor tests meet the fix."""

import hashlib
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.graders.base import Graded
from perdure.instances import instance_catalog
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import Attempt
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import Sandbox
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.types import (
    Environment,
    Grade,
    Grading,
    Instance,
    Outcome,
    PatchRef,
    Rewards,
    RolloutRequest,
    Source,
    SourceKind,
)
from tests import small_image
from tests.doubles.apptainer_cli import write_program

REQUEST = RolloutRequest(run_id="r1", instance="toy/add-1", agent="nop", sandbox="apptainer")
LOOK = "git cat-file --batch-all-objects --batch --unordered; git log --all --format=%s"


class Looks:
    """A grader that tells what the tests would find in the repository."""

    name = "looks"
    version = 1
    found: ClassVar[list[bytes]] = []

    def validate(self, instance: Instance) -> None:
        """Every row is accepted."""

    async def grade(
        self, sandbox: Sandbox, instance: Instance, patch: bytes, *, timeout_s: float
    ) -> Graded:
        self.found.append((await sandbox.exec(LOOK, cwd="/testbed", check=True)).stdout)
        return Graded(Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0)), b"")


def write_image(root: Path) -> str:
    """A root folder with a clone at its base, in which a later commit is the fix."""
    small_image.write_root(root)
    tree = root / "testbed"
    tree.mkdir()
    git = ["git", "-C", str(tree), "-c", "user.name=u", "-c", "user.email=u@x"]
    subprocess.run([*git, "init", "-q", "-b", "main"], check=True)
    for text in ("base", "secret-fix"):
        (tree / "code.py").write_text(f"{text}\n")
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "-q", "-m", text], check=True)
    subprocess.run([*git, "checkout", "-q", "-b", "work", "HEAD~1"], check=True)
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


@pytest.fixture
async def services(tmp_path: Path) -> Services:
    if missing := [why for why in (small_image.why_not(),) if why]:
        pytest.skip(missing[0])
    if missing := [*BubblewrapProvider(Settings(home=tmp_path / "h")).check()]:
        pytest.skip(missing[0])
    base = write_image(tmp_path / "image")
    services = Services(
        Settings(
            home=tmp_path / "home",
            store=str(tmp_path / "store"),
            apptainer={"program": write_program(tmp_path / "bin")},
        )
    )
    instance = Instance(
        instance_id="add-1",
        dataset="toy",
        problem_statement="add",
        base_commit=base,
        source=Source(kind=SourceKind.IMAGE),
        environment=Environment(image=str(tmp_path / "image")),
        grading=Grading(protocol=f"{__name__}:{Looks.__name__}"),
    )
    await instance_catalog.save(services.store, instance)
    return services


@pytest.mark.longer
async def test_the_agents_sandbox_holds_the_base_only(services: Services) -> None:
    """After the boot stage the fix is in no object, and the copy for the diff is cut too."""
    booted = await ActivityEnvironment().run(
        Stages(services).boot, Attempt(request=REQUEST, attempt=1)
    )
    (info,) = await services.provider("apptainer").list()
    sandbox = await services.provider("apptainer").attach(info.identity)
    found = await sandbox.exec(LOOK, cwd="/testbed", check=True)
    copies = await sandbox.exec("grep -rl secret-fix /testbed /tmp || true", check=True)
    await sandbox.kill()

    assert booted.attempt == 1
    assert b"secret-fix" not in found.stdout
    assert found.stdout.endswith(b"base\n")
    assert copies.stdout == b""


@pytest.mark.longer
async def test_the_grading_sandbox_holds_the_base_only(services: Services) -> None:
    """Code under test cannot fetch the fix from the repository either."""
    data = b"diff --git a/code.py b/code.py\n"
    await services.store.put(f"{store_keys.attempt(REQUEST, 1)}/patch.diff", data)
    ref = PatchRef(
        key=f"{store_keys.attempt(REQUEST, 1)}/patch.diff",
        sha256=hashlib.sha256(data).hexdigest(),
        size=1,
        empty=False,
        files=1,
    )
    await stage_checkpoints.write(
        services.store, f"{store_keys.attempt(REQUEST, 1)}/patch.json", ref
    )
    Looks.found.clear()
    await ActivityEnvironment().run(Stages(services).grade, Attempt(request=REQUEST, attempt=1))

    (found,) = Looks.found
    assert b"secret-fix" not in found
    assert found.endswith(b"base\n")
