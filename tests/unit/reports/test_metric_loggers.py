"""A run's curves for TensorBoard and W&B."""

import sys
from pathlib import Path

import pytest

from perdure.errors import MissingDependency
from perdure.reports.metric_loggers import points, write_tensorboard, write_wandb
from tests.unit.reports.made_runs import run_of

RUN = run_of("r", {"a": ["resolved", None], "b": ["unresolved"]})


def test_a_failed_rollout_has_no_reward_and_moves_no_share() -> None:
    """Its turns and seconds count; the share covers graded rollouts."""
    found = [point.values for point in points(RUN)]

    assert [point.step for point in points(RUN)] == [1, 2, 3]
    assert sum("rollout/reward" in values for values in found) == 2
    assert [one["run/resolved_share"] for one in found if "run/resolved_share" in one][-1] == 0.5
    assert all("rollout/seconds" in values for values in found)


def test_tensorboard_reads_what_its_client_wrote(tmp_path: Path) -> None:
    """Each curve has its name, and each run its folder."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(write_tensorboard(RUN, tmp_path)))
    read.Reload()

    assert [one.value for one in read.Scalars("rollout/reward")] == [1.0, 0.0]
    assert [one.step for one in read.Scalars("rollout/seconds")] == [1, 2, 3]


def test_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    """Nothing is sent: a person uploads the folder with `wandb sync`."""
    pytest.importorskip("wandb")

    folder = write_wandb(RUN, "perdure", tmp_path)

    assert folder.is_relative_to(tmp_path)
    assert list(folder.glob("*.wandb"))


def test_an_absent_client_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command that installs it."""
    monkeypatch.setitem(sys.modules, "wandb", None)

    with pytest.raises(MissingDependency, match=r"pip install .*wandb"):
        write_wandb(RUN, "perdure", tmp_path)
