"""Captures the diff after each turn of the agent, and grades it like the final one."""

from collections.abc import Awaitable, Callable, Sequence

from perdure.graders.diff import diff_capture
from perdure.graders.verdict_rules import F2P_PASSES
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.diff_storage import store_diff
from perdure.rollouts.simulated_user.user_turn import read_turns
from perdure.sandboxes.base import Sandbox
from perdure.storage import store_keys
from perdure.types import Grade, Outcome, PatchRef, TurnGrade

GradePatch = Callable[[Job, PatchRef, int], Awaitable[Grade]]
"""Grades the diff after a turn."""


async def capture(job: Job, sandbox: Sandbox, base_git: str | None, turn: int) -> PatchRef:
    """Take the diff while the agent waits for the user. Raises: SandboxLost."""
    most = job.services.settings.diff_max_bytes
    captured = await diff_capture.capture(sandbox, base_git, max_bytes=most)
    return await store_diff(job, f"turn-{turn}.diff", captured)


async def captured_turns(job: Job) -> list[tuple[int, PatchRef]]:
    """The turns with a diff, except the last one, whose diff is the final patch. Raises: AttemptDamaged."""
    if job.user is None or not job.user.grade_turns:
        return []
    turns = await read_turns(job.services.store, store_keys.attempt(job.request, job.attempt))
    return [(one.turn, one.patch) for one in turns if one.patch is not None]


async def with_turn_grades(
    job: Job, grade: Grade, turns: Sequence[tuple[int, PatchRef]], name: str, by_tests: GradePatch
) -> Grade:
    """The final grade with the grades of all turns. `name`: used in the names of its files."""
    grades = []
    for turn, patch in turns:

        async def graded(job: Job, turn: int = turn, patch: PatchRef = patch) -> TurnGrade:
            if patch.refused:
                return TurnGrade(
                    turn=turn, outcome=Outcome.CAPTURE_FAILED, reward=None, reason=patch.refused
                )
            return _turn_grade(job, turn, await by_tests(job, patch, turn))

        grades.append(await job.once(f"turn-{turn}-grade-{name}.json", TurnGrade, graded))
    grades.append(_turn_grade(job, len(grades) + 1, grade))
    named = {name: one for name, one in grade.named_rewards.items() if not name.startswith("turn-")}
    if grade.outcome is not Outcome.TAMPERED:
        named |= {f"turn-{one.turn}": one.reward for one in grades if one.reward is not None}
    return grade.model_copy(update={"turn_grades": tuple(grades), "named_rewards": named})


def _turn_grade(job: Job, turn: int, grade: Grade) -> TurnGrade:
    return TurnGrade(
        turn=turn,
        outcome=grade.outcome,
        reward=_reward(grade, _tests_of(job, turn)),
        reason=grade.reason,
        patch_sha256=grade.patch_sha256,
    )


def _tests_of(job: Job, turn: int) -> tuple[str, ...]:
    """The tests that a turn names, without those that calibration left out of the row."""
    named = job.user.turn_tests if job.user else ()
    known = {*job.instance.grading.fail_to_pass, *job.instance.grading.pass_to_pass}
    return tuple(test for test in named[turn - 1] if test in known) if turn <= len(named) else ()


def _reward(grade: Grade, tests: tuple[str, ...]) -> float | None:
    if not tests or grade.withheld or grade.outcome is Outcome.TAMPERED:
        return grade.reward
    found = {**grade.pass_to_pass, **grade.fail_to_pass}
    return sum(found.get(test) in F2P_PASSES for test in tests) / len(tests)
