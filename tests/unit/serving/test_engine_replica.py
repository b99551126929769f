"""One start of an engine on its node: what it finds in the folder that it shares."""

from pathlib import Path

from perdure.serving.engine_replica import KEPT_LOGS, Replica
from perdure.serving.replica_plan import EnginePlan


def test_a_log_that_another_replica_removes_meanwhile_ends_no_start(tmp_path: Path) -> None:
    """Replicas of a node delete old logs at the same time; a log may vanish after it was listed."""
    for number in range(KEPT_LOGS):
        (tmp_path / f"old-{number}.log").write_text("words\n")
    (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
    replica = Replica(EnginePlan(model="m", folder=str(tmp_path)), "new", 1, "127.0.0.1")

    assert replica._prepare() == 0
    assert len(list(tmp_path.glob("*.log"))) == KEPT_LOGS
