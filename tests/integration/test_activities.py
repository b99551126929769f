"""Activities on a real store with real sandboxes, called one by one as a worker would."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from activities.sweep_activities import SweepActivities
from perdure import home_folder
from perdure.errors import ControlPlaneError, RateLimited
from perdure.graders.base import Graded
from perdure.graders.protocols.eval_cmd import EvalCmdGrader
from perdure.graders.twins.paired_runs import GradeOnce, Verified
from perdure.instances import instance_catalog
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import Attempt, GradedPatch, SweepRequest
from perdure.rollouts.grade_stage import MAX_LOST
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.agent_user import SYSTEM_PATH
from perdure.sandboxes.base import ExecStatus, Sandbox, SandboxSpec
from perdure.sandboxes.providers.local import LocalProvider
from perdure.settings.settings_tree import Settings
from perdure.stack import home_providers
from perdure.stack.home_providers import kill_all
from perdure.storage import store_keys, stored_json
from perdure.types import Grading, Instance, Outcome, PatchRef, RolloutRequest
from tests.integration.one_row import ROW, save_row

REQUEST = RolloutRequest(run_id="r1", instance=ROW, agent="nop", sandbox="local")
PATCH = b"diff --git a/a.txt b/a.txt\n"


class OwnProvider(LocalProvider):
    """A provider of the user's own, beside the registered ones."""

    name = "own"


class TakesItsSandboxDown:
    """A grader whose tests kill the sandbox they run in, as a test that uses too much memory may."""

    name = "takes_its_sandbox_down"
    version = 1

    def validate(self, instance: Instance) -> None:
        """Every row is accepted."""

    async def grade(
        self, sandbox: Sandbox, instance: Instance, patch: bytes, *, timeout_s: float
    ) -> Graded:
        await sandbox.kill()
        await sandbox.exec("true", timeout=timeout_s)
        raise AssertionError("a killed sandbox still runs commands")


FIX = b"diff --git a/a.txt b/a.txt\n--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-one\n+two\n"
KILLER = FIX.replace(b"+two", b"+three")


class LosesSandboxes(EvalCmdGrader):
    """Sandboxes that die while a step of the grader runs in them: that of `STEPS` for KILLER, and that of
    `CONTROL` for the row's own fix."""

    SETUP, TESTS, NEVER, SILENT = 1, 2, 0, -2
    """SILENT: it does not die in its tests, but its service gets no answer from it."""
    STEPS: ClassVar[list[int]] = []
    CONTROL: ClassVar[int] = NEVER

    async def grade(
        self, sandbox: Sandbox, instance: Instance, patch: bytes, *, timeout_s: float
    ) -> Graded:
        dies_at = self.CONTROL if patch == FIX else self.STEPS.pop(0)
        plainly, waits = sandbox.wait, 0

        async def wait(exec_id: str, timeout_s: float | None = None) -> ExecStatus:
            nonlocal waits
            waits += 1
            if waits == -dies_at:
                raise ControlPlaneError("out of processes")
            if waits == dies_at:
                await sandbox.kill()
            return await plainly(exec_id, timeout_s)

        sandbox.wait = wait  # type: ignore[method-assign]  # this sandbox is the test's
        return await super().grade(sandbox, instance, patch, timeout_s=timeout_s)


@pytest.fixture
async def services(tmp_path: Path) -> Services:
    """A home in which attempt 1 of REQUEST has its diff and waits for its grade."""
    local = {"allow_local": True}
    services = Services(
        Settings(home=tmp_path / "home", store=str(tmp_path / "store"), sandbox=local)
    )
    grading = Grading(protocol=f"{__name__}:{TakesItsSandboxDown.__name__}")
    await save_row(services, tmp_path / "tree", grading=grading)
    await captured(services, PATCH)
    return services


async def captured(services: Services, patch: bytes) -> str:
    """Attempt 1 of REQUEST left this diff; returns its key."""
    folder = store_keys.attempt(REQUEST, 1)
    await services.store.put(f"{folder}/patch.diff", patch)
    digest = hashlib.sha256(patch).hexdigest()
    ref = PatchRef(key=f"{folder}/patch.diff", sha256=digest, size=len(patch), empty=False, files=1)
    await services.store.put(f"{folder}/patch.json", stored_json.encode(ref))
    return ref.key


async def test_grading_sandboxes_that_are_always_lost_end_the_grading(services: Services) -> None:
    """Two losses are retried; the third is final, at the sandbox boundary, without a reward."""
    grade = Stages(services).grade
    causes: list[ApplicationError] = []
    for _ in range(MAX_LOST):
        with pytest.raises(ApplicationError) as lost:
            await ActivityEnvironment().run(grade, Attempt(request=REQUEST, attempt=1))
        causes.append(lost.value)

    assert [cause.non_retryable for cause in causes] == [False, False, True]
    assert {cause.details[0] for cause in causes} == {"sandbox"}
    assert causes[-1].type == "GradingSandboxesLost"


@pytest.mark.parametrize("damage", [b"", FIX, None], ids=["emptied", "another fix", "gone"])
async def test_a_patch_that_is_not_the_captured_one_is_never_graded(
    services: Services, damage: bytes | None
) -> None:
    """It ends the attempt without a verdict; the next one replays the recorded turns."""
    key = await captured(services, PATCH)
    if damage is None:
        await services.store.delete(key)
    else:
        await services.store.put(key, damage)

    with pytest.raises(ApplicationError) as lost:
        await ActivityEnvironment().run(Stages(services).grade, Attempt(request=REQUEST, attempt=1))

    assert (lost.value.type, lost.value.non_retryable) == ("SandboxLost", True)
    assert f"{key} is" in str(lost.value)


SETUP, TESTS, NEVER = LosesSandboxes.SETUP, LosesSandboxes.TESTS, LosesSandboxes.NEVER
SILENT = LosesSandboxes.SILENT


async def _graded_after_losses(
    services: Services, monkeypatch: pytest.MonkeyPatch, steps: list[int], control: int
) -> GradedPatch:
    """The answer of the third try to grade KILLER. Raises: ApplicationError."""
    instance = await instance_catalog.load(services.store, REQUEST.instance)
    grading = Grading(protocol=f"{__name__}:{LosesSandboxes.__name__}", eval_cmd="grep two a.txt")
    row = instance.model_copy(update={"gold_patch": FIX, "grading": grading})
    await instance_catalog.save(services.store, row)
    await captured(services, KILLER)
    monkeypatch.setattr(LosesSandboxes, "STEPS", steps)
    monkeypatch.setattr(LosesSandboxes, "CONTROL", control)
    grade = Stages(services).grade
    for _ in range(MAX_LOST - 1):
        with pytest.raises(ApplicationError, match="the grading sandbox was lost"):
            await ActivityEnvironment().run(grade, Attempt(request=REQUEST, attempt=1))
    return await ActivityEnvironment().run(grade, Attempt(request=REQUEST, attempt=1))


@pytest.mark.parametrize(
    "how",
    [TESTS, pytest.param(SILENT, marks=pytest.mark.longer)],
    ids=["by ending it", "by a fork bomb"],
)
async def test_tests_that_end_every_sandbox_are_a_verdict(
    services: Services, monkeypatch: pytest.MonkeyPatch, how: int
) -> None:
    """A policy cannot discard an episode: where the row's own fix lives in such a sandbox, it gets 0."""
    graded = await _graded_after_losses(services, monkeypatch, [how] * MAX_LOST, NEVER)

    assert (graded.outcome, graded.reward) == (Outcome.SANDBOX_DESTROYED, 0.0)
    assert graded.reason.startswith("the tests ended 3 sandboxes")


@pytest.mark.parametrize(
    ("steps", "control"),
    [
        pytest.param([TESTS] * MAX_LOST, TESTS, id="the row's own fix loses its sandbox too"),
        pytest.param([TESTS, SETUP, TESTS], NEVER, id="one died before the tests"),
    ],
)
async def test_a_loss_that_may_be_the_hosts_gives_no_reward(
    services: Services, monkeypatch: pytest.MonkeyPatch, steps: list[int], control: int
) -> None:
    """Three losses are no verdict while one of them is not proven to be the doing of the tests."""
    with pytest.raises(ApplicationError) as lost:
        await _graded_after_losses(services, monkeypatch, steps, control)

    assert lost.value.type == "GradingSandboxesLost"


class EndsWithoutResult(EvalCmdGrader):
    """Tests that end as `OUTCOME`, those of the row's own fix as well if `EVERY`."""

    OUTCOME: ClassVar[Outcome] = Outcome.UNPARSABLE
    EVERY: ClassVar[bool] = True

    async def grade(
        self, sandbox: Sandbox, instance: Instance, patch: bytes, *, timeout_s: float
    ) -> Graded:
        graded = await super().grade(sandbox, instance, patch, timeout_s=timeout_s)
        if patch == FIX and not self.EVERY:
            return graded
        grade = graded.grade.model_copy(update={"outcome": self.OUTCOME})
        return Graded(grade, graded.log)


@pytest.mark.parametrize(
    "every", [True, False], ids=["the control also does", "the control does not"]
)
@pytest.mark.parametrize(
    ("outcome", "said"),
    [(Outcome.UNPARSABLE, "neither can the control's"), (Outcome.TIMEOUT, "so does the control")],
)
async def test_tests_that_give_no_result_are_a_verdict_after_a_control(
    services: Services, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, said: str, every: bool
) -> None:
    """If the row's own fix also ends without a result, this host may be the cause."""
    instance = await instance_catalog.load(services.store, REQUEST.instance)
    protocol = f"{__name__}:{EndsWithoutResult.__name__}"
    grading = Grading(protocol=protocol, eval_cmd="grep two a.txt")
    row = instance.model_copy(update={"gold_patch": FIX, "grading": grading})
    await instance_catalog.save(services.store, row)
    await captured(services, KILLER)
    monkeypatch.setattr(EndsWithoutResult, "OUTCOME", outcome)
    monkeypatch.setattr(EndsWithoutResult, "EVERY", every)
    grade = Stages(services).grade
    if every:
        with pytest.raises(ApplicationError, match=said):
            await ActivityEnvironment().run(grade, Attempt(request=REQUEST, attempt=1))
        return
    graded = await ActivityEnvironment().run(grade, Attempt(request=REQUEST, attempt=1))

    assert (graded.outcome, graded.reward) == (outcome, 0.0)


async def test_a_later_run_of_a_grading_waits_at_the_accounts_cap(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grading with twins makes sandbox after sandbox. One that is refused is asked for again: the
    runs before it are not repeated."""
    made: list[str] = []
    plainly = LocalProvider.create

    async def create(self: LocalProvider, spec: SandboxSpec, identity: str) -> Sandbox:
        made.append(identity)
        if len(made) == 2:
            raise RateLimited("too many creates", retry_after=0.01)
        return await plainly(self, spec, identity)

    async def twice(
        instance: Instance,
        pairs: int,
        grade_once: GradeOnce,
        *,
        at_once: bool,
        without: Mapping[str, str],
    ) -> Verified:
        runs = [await grade_once(instance) for _ in range(2)]
        return Verified(runs[0].grade, tuple(runs))

    monkeypatch.setattr(LocalProvider, "create", create)
    monkeypatch.setattr("perdure.rollouts.grade_stage.verified", twice)
    instance = await instance_catalog.load(services.store, REQUEST.instance)
    grading = Grading(protocol="eval_cmd", eval_cmd="grep two a.txt")
    await instance_catalog.save(services.store, instance.model_copy(update={"grading": grading}))
    await captured(services, FIX)

    graded = await ActivityEnvironment().run(
        Stages(services).grade, Attempt(request=REQUEST, attempt=1)
    )

    assert (graded.outcome, len(made)) == (Outcome.RESOLVED, 3)


JUDGE = b"diff --git a/judge.py b/judge.py\nnew file mode 100644\n--- /dev/null\n+++ b/judge.py\n@@ -0,0 +1 @@\n+seen = sys._getframe(1)\n"  # fmt: skip
OUTSIDE = FIX.replace(b"a.txt", b".git/config")


@pytest.mark.parametrize(
    ("patch", "rewards", "why"),
    [
        (FIX, (1.0, 1.0), ""),
        (FIX + JUDGE, (1.0, None), "unverified, and its patch has signals: judge.py: "
         "sys._getframe (frames)"),
        (OUTSIDE, (0.0, -0.5), "the diff writes into .git: '.git/config'"),
    ],
    ids=["honest", "a success with signals", "tampered"],
)  # fmt: skip
async def test_a_request_prices_tampering_and_withholds_rewards(
    services: Services, patch: bytes, rewards: tuple[float, float | None], why: str
) -> None:
    """By default nothing costs more than failing; the reason of what does is in the answer."""
    instance = await instance_catalog.load(services.store, REQUEST.instance)
    grading = Grading(protocol="eval_cmd", eval_cmd="grep two a.txt")
    await instance_catalog.save(services.store, instance.model_copy(update={"grading": grading}))
    await captured(services, patch)
    rules = {"tampered_reward": -0.5, "withheld_rewards": ("signals",)}
    asked = [REQUEST, REQUEST.model_copy(update=rules)]
    found = [
        await ActivityEnvironment().run(
            Stages(services).grade,
            Attempt(request=one, attempt=1, workflow_run_id=f"{n}"),
        )
        for n, one in enumerate(asked)
    ]

    assert tuple(graded.reward for graded in found) == rewards
    assert found[-1].reason == why


async def test_a_service_that_is_away_is_waited_for(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the row's own fix gets no answer either, the grading is tried again, however often."""
    monkeypatch.setitem(globals(), "MAX_LOST", 1)
    for _ in range(4):
        with pytest.raises(ApplicationError, match="does not answer") as waits:
            await _graded_after_losses(services, monkeypatch, [SILENT], SILENT)

    assert (waits.value.type, waits.value.non_retryable) == ("RetryHere", False)


async def test_a_tree_that_gave_no_diff_is_a_verdict(services: Services) -> None:
    """Where the agent left no diff to form, its grade is 0 with the reason, and no sandbox boots."""
    request = REQUEST.model_copy(update={"sample_index": 1})
    folder = store_keys.attempt(request, 1)
    ref = PatchRef(
        key=f"{folder}/patch.diff", sha256="0" * 64, size=0, empty=True, refused="the disk is full"
    )
    await stage_checkpoints.write(services.store, f"{folder}/patch.json", ref)

    graded = await ActivityEnvironment().run(
        Stages(services).grade, Attempt(request=request, attempt=1)
    )

    assert (graded.outcome, graded.reward) == (Outcome.CAPTURE_FAILED, 0.0)
    assert graded.reason == "the disk is full"


async def test_a_provider_that_was_named_by_path_is_swept(services: Services) -> None:
    """The reaper and `perdure down` find sandboxes of a provider that no registry names."""
    await services.provider(f"{__name__}:{OwnProvider.__name__}").create(
        SandboxSpec(workdir="/testbed", tree=services.home.parent / "tree"), "p-own-1"
    )
    another_worker = SweepActivities(Services(services.settings))

    swept = await ActivityEnvironment().run(another_worker.sweep, SweepRequest())
    killed = await kill_all(services.settings, print)

    assert (swept.found, killed) == (1, 1)


async def test_a_host_that_gives_its_sandboxes_up_has_its_seats_free(services: Services) -> None:
    """Otherwise its next worker would wait two minutes for seats that nothing renews."""
    await services.provider("local").create(
        SandboxSpec(workdir="/testbed", tree=services.home.parent / "tree"), "p-local-3"
    )
    services.seats.take("p-local-3")
    await kill_all(services.settings, print)

    assert services.seats.agents() == 0


async def test_a_dead_docker_daemon_does_not_stop_the_clean_up(
    services: Services,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`perdure down` names providers that it could not ask, and ends the sandboxes of the others."""
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    docker.chmod(0o755)
    path = f"{docker.parent}:{SYSTEM_PATH}"
    monkeypatch.setattr("perdure.sandboxes.host.sandbox_programs.SYSTEM_PATH", path)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere")
    monkeypatch.setattr(home_providers, "LOOK_S", 2.0)
    (services.home / "docker").mkdir(parents=True)
    await services.provider("local").create(
        SandboxSpec(workdir="/testbed", tree=services.home.parent / "tree"), "p-local-2"
    )

    told: list[str] = []
    assert await kill_all(services.settings, told.append) == 1
    assert "docker are left to their time limit: it does not answer" in "".join(told)


async def test_a_provider_that_has_moved_does_not_stop_the_rest(services: Services) -> None:
    """Sandboxes of the old name are left to their time limit; the others are ended."""
    home_folder.record_provider(services.home, "gone.providers:Moved")
    await services.provider("local").create(
        SandboxSpec(workdir="/testbed", tree=services.home.parent / "tree"), "p-local-1"
    )

    assert await kill_all(services.settings, print) == 1
