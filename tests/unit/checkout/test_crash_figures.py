"""Which turns the crash benchmark counts as in flight, which calls as bought, and which verdicts as wrong."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.call_log import DELIVERY_S, CallLog, EndpointCall, KillWindow
from benchmarks.crash.crash_outcome import Kill, LeftBehind, Outcome
from benchmarks.crash.crash_runners import sandbox_of
from benchmarks.peers.base import Job, Verdicts
from benchmarks.peers.harbor import Harbor
from benchmarks.peers.inspect_ai import counted
from perdure.adoption.foreign_rollouts import ForeignRollout

AT = KillWindow(100.0, 100.1)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[CallLog]:
    made = CallLog(tmp_path / "ledger.tsv")
    yield made
    made.close()


def _call(session: str, began: float, ended: float) -> EndpointCall:
    return EndpointCall(session, began, ended)


def test_a_call_of_a_killed_engine_is_bought_and_over(ledger: CallLog) -> None:
    """Its line was written before its answer, and the kill ends it for every later kill."""
    ledger.begin("a")
    open_call = ledger.calls()[0]
    ledger.cut()
    (call,) = ledger.calls()

    assert open_call.ended == float("inf")
    assert call.ended <= time.monotonic()


def test_an_end_without_a_beginning_is_another_jobs(ledger: CallLog) -> None:
    """A call that still ran when the counts were reset is not counted for the next side."""
    name = ledger.begin("a")
    ledger.clear()
    ledger.end(name)

    assert ledger.calls() == []


def test_an_agent_has_at_most_one_turn_in_flight() -> None:
    """An answer on its way and the next call of the same agent count once."""
    calls = [_call("a", 99.0, 99.95), _call("a", 100.05, 101.0), _call("b", 99.0, 101.0)]

    assert Kill("everything", AT).in_flight(calls, agents=8) == 2


def test_a_turn_that_ended_before_the_kill_or_began_after_it_was_not_in_flight() -> None:
    """Only the time of delivery is added to a call."""
    calls = [_call("a", 98.0, 99.9 - DELIVERY_S), _call("b", 100.2, 101.0)]

    assert Kill("everything", AT).in_flight(calls, agents=8) == 0


def test_a_killed_sandbox_strikes_its_own_turn_only() -> None:
    """Turns of other sandboxes go on, so they may not be bought again."""
    calls = [_call("a", 99.0, 101.0), _call("b", 99.0, 101.0)]

    assert Kill("1 sandbox", AT, sessions=("a",)).in_flight(calls, agents=8) == 1


def test_callers_without_a_session_count_as_agents() -> None:
    """Peers name no session: at most one turn of each agent that runs at once."""
    calls = [_call("", 99.0, 101.0) for _ in range(12)]

    assert Kill("everything", AT).in_flight(calls, agents=8) == 8


def test_a_rollout_that_no_result_names_is_not_a_zero() -> None:
    """A tool that lost a rollout did not call it a failure."""
    outcome = Outcome(
        side="Harbor",
        rollouts=4,
        ideal_calls=40,
        finished_at_kill=1,
        calls=40,
        in_flight={},
        resume_wall=1.0,
        cpu=1.0,
        right=2,
        zeros=1,
        left_behind=LeftBehind(folders=0, mounts=0, groups=0, processes=0),
        sandboxes_killed=1,
    )

    assert outcome.unscored == 1


def test_harbors_trial_without_a_reward_is_not_a_zero(tmp_path: Path) -> None:
    """An exception leaves `verifier_result` empty."""
    job = Job(tmp_path, tmp_path, rollouts=3, workers=1, endpoint_url="")
    results = [{"rewards": {"reward": 1.0}}, {"rewards": {"reward": 0.0}}, None]
    for number, result in enumerate(results):
        trial = tmp_path / "jobs" / "bench" / f"toy-{number}"
        trial.mkdir(parents=True)
        (trial / "result.json").write_text(json.dumps({"verifier_result": result}))

    assert Harbor.__new__(Harbor).verdicts(job) == Verdicts(resolved=1, zeros=1)


def test_inspects_sample_with_an_error_is_not_a_zero() -> None:
    """`inspect_logs` prints no scores for it."""
    samples = [
        ForeignRollout(instance_id=name, origin="Inspect", file=name, scores=scores)
        for name, scores in (("a", {"hidden_test": 1.0}), ("b", {"hidden_test": 0.0}), ("c", None))
    ]

    assert counted(samples) == Verdicts(resolved=1, zeros=1)


BOX = "--bind /job/tmp/harbor-box-1/app /app --bind /job/tmp/harbor-box-1/logs /logs"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"bwrap --ro-bind /job/repo /repo {BOX} --chdir /app bash -c true", "harbor-box-1"),
        ("bwrap --bind /job/tmp/mini-a /job/tmp/mini-a bash -c true", "mini-a"),
        (f"bwrap {BOX} --chdir /app bash -c bash /tests/test.sh", None),
        (f"bwrap {BOX} --chdir /app git clone -q /repo .", None),
        ("bash -c true", None),
    ],
)
def test_only_a_sandbox_that_runs_an_agents_command_is_killed(
    command: str, expected: str | None
) -> None:
    """A boot, a checkpoint or a grading is not the agent's work."""
    found = sandbox_of(command, Path("/job/tmp"), ("true", "git diff"))

    assert found == (expected and Path("/job/tmp", expected))
