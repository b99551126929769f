"""Writes a run's rollouts as curves for TensorBoard and W&B, with their own clients.

Each finished rollout is a step, in the order in which they finished.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from perdure.errors import MissingDependency
from perdure.installation import command_for_packages
from perdure.reports.rollout_facts import RunFacts


class Point(NamedTuple):
    step: int
    at: float
    """Unix time at which the rollout finished."""
    values: dict[str, float]


def points(run: RunFacts) -> Iterator[Point]:
    """Each rollout's figures, and the resolved share of the rollouts graded until then."""
    graded = resolved = 0
    for step, one in enumerate(sorted(run.rollouts, key=lambda one: one.finished_at), start=1):
        values = {
            "rollout/turns": float(one.turns),
            "rollout/prompt_tokens": float(one.prompt_tokens),
            "rollout/sampled_tokens": float(one.sampled_tokens),
            "rollout/seconds": one.seconds,
        }
        if one.graded:
            graded, resolved = graded + 1, resolved + one.resolved
            values["run/resolved_share"] = resolved / graded
        if one.reward is not None:
            values["rollout/reward"] = one.reward
        values |= {f"rollout/rewards/{name}": value for name, value in one.named_rewards.items()}
        if one.version_max is not None:
            values["rollout/policy_version"] = float(one.version_max)
        yield Point(step, one.finished_at, values)


def write_tensorboard(run: RunFacts, folder: Path) -> Path:
    """Write event files below `folder/RUN`. Raises: MissingDependency."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise MissingDependency(
            f"--tensorboard needs its client: {command_for_packages('tensorboard')}"
        ) from None
    writer = EventFileWriter(str(folder / run.run_id))
    for point in points(run):
        values = [Summary.Value(tag=tag, simple_value=v) for tag, v in point.values.items()]
        writer.add_event(Event(wall_time=point.at, step=point.step, summary=Summary(value=values)))
    writer.close()
    return folder / run.run_id


def write_wandb(run: RunFacts, project: str, folder: Path) -> Path:
    """Write an offline run into `folder`; `wandb sync` uploads it. Raises: MissingDependency."""
    try:
        import wandb
    except ImportError:
        raise MissingDependency(
            f"--wandb needs its client: {command_for_packages('wandb')}"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    logged: Any = wandb.init(project=project, name=run.run_id, dir=str(folder), mode="offline")
    for point in points(run):
        logged.log({**point.values, "finished_at": point.at}, step=point.step)
    logged.finish()
    return Path(logged.settings.sync_dir)
