"""A `Rollouter` for TorchTitan that runs Perdure's rollouts.

PerdureRollouter.Config(
    run_id="try-1",
    dataset="r2e",
    train_dataset=Instances.Config(path="train.jsonl"),
    validation_dataset=Instances.Config(path="held-out.jsonl", shuffle=False),
    rollout=RolloutFields(agent="claude_code", sandbox="daytona"),
)
"""

import asyncio
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchtitan.config import Configurable
from torchtitan.experiments.rl.environment import MessageEnv
from torchtitan.experiments.rl.observability import metrics as m
from torchtitan.experiments.rl.rollout.rollouter import Rollouter
from torchtitan.experiments.rl.rollout.types import GenerateFn, Rollout, RolloutGroup
from torchtitan.experiments.rl.rubrics import Rubric

from perdure.client.episode_reader import read_turns
from perdure.episodes.episode import EpisodeSegments
from perdure.episodes.trainer_formats import graded
from perdure.errors import ConfigurationError, NoResult
from perdure.instances.rows.row_conversion import dataset_name
from perdure.integrations import trainer_engine, trainer_hooks
from perdure.integrations.torchtitan.generator import ACCEPTED, Generator
from perdure.integrations.torchtitan.instances import Instances
from perdure.integrations.torchtitan.rollouts import rollout_of
from perdure.integrations.torchtitan.rubric import Graded
from perdure.types import RolloutRequest


@dataclass(kw_only=True, slots=True)
class RolloutFields:
    """Fields of every RolloutRequest, each a flag of the launcher: `--rollouter.rollout.sandbox daytona`."""

    agent: str = "claude_code"
    sandbox: str = "bubblewrap"
    agent_budget_s: float | None = None
    max_attempts: int | None = None
    """None here or above: the value of a variable such as `SWE_TIME_BUDGET_SEC`, otherwise the request's
    default."""
    max_context_tokens: int | None = None
    """Tokens of prompt and answers together. It must be less than a row of the trainer's batch."""
    more: str = "{}"
    """Other fields, as a JSON object: `{"limits": {"memory_mb": 8192}}`."""

    def to_request(self) -> dict[str, Any]:
        """Raises: ConfigurationError if `more` is not a JSON object."""
        try:
            fields = {**json.loads(self.more)}
        except (ValueError, TypeError) as error:
            raise ConfigurationError(
                f"rollouter.rollout.more must be a JSON object: {error}"
            ) from None
        sampling = dict(fields.pop("sampling", None) or {})
        if self.max_context_tokens is not None:
            sampling["max_context_tokens"] = self.max_context_tokens
        given = {name: getattr(self, name) for name in FIELDS}
        own = {name: value for name, value in given.items() if value is not None}
        return {**own, **fields, "sampling": sampling}


FIELDS = ("agent", "sandbox", "agent_budget_s", "max_attempts")
REFUSED = {"mask": "a rollout of its groups has no mask"}


def _is_too_stale(found: EpisodeSegments | None) -> bool:
    return found is not None and bool(found.episode.too_stale)


class PerdureRollouter(Rollouter):  # type: ignore[misc]  # torchtitan has no types
    """Runs one Perdure rollout per sibling of a group. The agent brings its own tools and messages, so
    TorchTitan's environments and renderer are not used."""

    @dataclass(kw_only=True, slots=True)
    class Config(Rollouter.Config):  # type: ignore[misc]
        train_dataset: Configurable.Config = field(default_factory=Instances.Config)
        validation_dataset: Configurable.Config = field(
            default_factory=lambda: Instances.Config(shuffle=False)
        )
        rubric: Rubric.Config = field(
            default_factory=lambda: Rubric.Config(reward_fns=[Graded.Config()])
        )
        message_env: MessageEnv.Config = field(default_factory=MessageEnv.Config)
        """Not used."""
        run_id: str = ""
        """Names this training run. Empty = a new name at each start."""
        dataset: str = ""
        """The dataset of rows that do not name their `instance`. Empty = the training file's name."""
        rollout: RolloutFields = field(default_factory=RolloutFields)
        engine_host: str = ""
        """The address at which gateways reach the controller. Empty = its own address in its
        connection to Temporal."""
        engine_port: int = 0
        """0 = any free port."""

    def __init__(self, config: "PerdureRollouter.Config") -> None:
        super().__init__(config)
        rows = getattr(config.train_dataset, "path", "")
        dataset = config.dataset or (dataset_name(rows) if rows else None)
        run_id = config.run_id or trainer_hooks.new_run_id("torchtitan")
        own = {"run_id": run_id, "dataset": dataset, "engine_host": config.engine_host}
        fields, self._without_verdict = trainer_hooks.split_without_verdict(
            {**config.rollout.to_request(), **own}, "TorchTitan", "short", REFUSED
        )
        self._fields, self._engine = trainer_engine.engine_of_run(
            fields, ACCEPTED, port=config.engine_port
        )
        self._generator = Generator()
        self._started = time.strftime("%y%m%d%H%M%S")
        """TorchTitan counts groups from 0 at each start, and they must not join those of an earlier
        start."""
        self._calls: Counter[int] = Counter()

    async def run_group_rollouts(
        self,
        *,
        generate_fn: GenerateFn,
        sample: Any,
        group_id: int,
        group_size: int,
        sampling: Any,
        renderer: object = None,
    ) -> RolloutGroup:
        """The group's graded rollouts, scored. Failed rollouts are left out before scoring, and those that
        are too stale after it.

        Raises: NoResult if no rollout was graded, or, with `without_verdict: drop`, if one was not (the
        controller counts a failed group); ConfigurationError.
        """
        requests = self._requests(sample, group_id, group_size, sampling)
        if self._engine is not None:
            await self._engine.use(partial(self._generator.sample, generate_fn, sampling))
        replaces = self._without_verdict == "replace"
        found = await asyncio.gather(
            *(trainer_hooks.finished(request, replaces=replaces) for request in requests)
        )
        missing = sum(map(trainer_hooks.lacks_verdict, found))
        if missing and self._without_verdict == "drop":
            raise NoResult(
                f"{missing} of {group_size} rollouts of {requests[0].run_id} have no verdict, so "
                "their group is dropped"
            )
        rollouts = await self._rollouts(found, group_id)
        if not rollouts:
            raise NoResult(f"none of {group_size} rollouts of {requests[0].run_id} was graded")
        group = await self._scored(RolloutGroup(group_id=group_id, rollouts=rollouts), sample)
        group.rollouts = [
            rollout for rollout in rollouts if not _is_too_stale(found[rollout.rollout_id])
        ]
        if not group.rollouts:
            raise NoResult(f"all graded rollouts of {requests[0].run_id} are too stale to train")
        count = len(group.rollouts)
        group.rollouts[0].turns[0].metrics += [
            m.Metric("perdure/left_out", m.Mean((group_size - len(rollouts)) / group_size)),
            m.Metric("perdure/too_stale", m.Mean((len(rollouts) - count) / group_size)),
            *self._generator.take_metrics(),
        ]
        return group

    async def close(self) -> None:
        """Stop serving the generator. Without this call it ends with the controller's process."""
        if self._engine is not None:
            await self._engine.stop()

    def _requests(
        self, sample: Any, group_id: int, group_size: int, sampling: Any
    ) -> list[RolloutRequest]:
        self._calls[group_id] += 1  # each validation pass has the same group ids
        told = trainer_hooks.sampling_of(dataclasses.asdict(sampling))
        kind = f"eval-{-group_id}" if group_id < 0 else f"{group_id}"
        return [
            trainer_hooks.request_of(
                self._fields,
                step=f"{self._started}-{kind}-{self._calls[group_id]}",
                instance=sample,
                sample_index=index,
                sampling=told,
            )
            for index in range(group_size)
        ]

    async def _rollouts(
        self, found: Sequence[EpisodeSegments | None], group_id: int
    ) -> list[Rollout]:
        return [
            rollout_of(one, await read_turns(one.episode), group_id=group_id, rollout_id=index)
            for index, one in enumerate(found)
            if one is not None and graded([one])
        ]

    async def _scored(self, group: RolloutGroup, sample: Any) -> RolloutGroup:
        """Score as TorchTitan does: rewards, then advantages."""
        outputs = await self.score_group(group.rollouts, sample)
        for rollout, output in zip(group.rollouts, outputs, strict=True):
            rollout.reward, rollout.reward_breakdown = output.reward, output.reward_breakdown
        advantages = self.advantage_estimator(group)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            rollout.advantage = advantage
        return group
