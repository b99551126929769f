"""verifiers and prime-rl: an environment whose episodes are Perdure's rollouts.

verifiers finds an environment by its module name, so yours is a file of two lines, `perdure_env.py`:

    from perdure.integrations.verifiers import Instances, PerdureEnv
    __all__ = ["Instances", "PerdureEnv"]

prime-rl's own inference servers sample; its client names them. An evaluation without a token
endpoint (`EvalClientConfig`) uses the engines of Perdure's gateways.
"""

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import Field, TypeAdapter
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import resolve_agent
from verifiers.v1.configs.env import default_agent_harness
from verifiers.v1.episode import EnvInfo
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, Error, ModelCall, TraceTask
from verifiers.v1.types import Message, SamplingMask

from perdure.client.episode_reader import read_turns
from perdure.episodes.episode import Episode, EpisodeSegments
from perdure.episodes.recorded_messages import answer_of, conversations
from perdure.episodes.segment_experts import segment_experts
from perdure.errors import ConfigurationError
from perdure.instances.rows.row_conversion import dataset_name
from perdure.integrations import trainer_engine, trainer_hooks
from perdure.types import ExpertRows, FinishReason, Turn

Watch = Callable[[vf.Trace], None]
REFUSED = dict.fromkeys(
    ("drop", "mask"), "its orchestrator decides about a group with an episode that has an error"
)


class InstancesConfig(vf.TasksetConfig):  # type: ignore[misc]  # without verifiers installed it is Any
    path: str = ""
    """A JSONL file. Each row names its `instance` or its `instance_id`."""


class InstanceData(vf.TaskData):  # type: ignore[misc]
    row: dict[str, Any]


class InstanceTask(vf.Task[InstanceData]):  # type: ignore[misc]
    """One row."""


class Instances(vf.Taskset[InstanceTask, InstancesConfig]):  # type: ignore[misc]
    """The rows of a file."""

    def load(self) -> Iterable[InstanceTask]:
        """Raises: ConfigurationError."""
        try:
            lines = Path(self.config.path).read_text("utf-8").splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self.config.path!r} is not a JSONL file: {error}") from None
        for row in rows:
            name = str(row.get("instance") or row.get("instance_id") or "") or (
                trainer_hooks.instance_of(row, dataset_name(self.config.path))
            )
            yield InstanceTask(InstanceData(id=name, name=name, row=row), self.config.task)


class PerdureEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    agent: vf.AgentConfig = vf.AgentConfig()
    """Only its model and sampling are used; `rollout` sets harness and runtime."""
    run_id: str = ""
    """Names this training run."""
    dataset: str = ""
    """The dataset of rows that do not name their `instance`. Empty = the file's name."""
    rollout: dict[str, Any] = Field(default_factory=dict)
    """Other fields of a RolloutRequest: agent, sandbox, limits, ... Also `engine: perdure`, for the engines
    of Perdure's gateways, and `without_verdict`."""


class PerdureEnv(vf.Env[PerdureEnvConfig]):  # type: ignore[misc]
    """Runs one rollout per episode, as one trace with one branch per segment."""

    def __init__(self, config: PerdureEnvConfig) -> None:
        super().__init__(config)
        self._process = secrets.token_hex(4)
        """Tells apart the rollouts of several env servers and of several starts."""
        self._samples: Counter[str] = Counter()
        fields, self._without_verdict = trainer_hooks.split_without_verdict(
            config.rollout, "prime-rl", "short", REFUSED
        )
        self._fields, self._uses_trainers = trainer_engine.split_engine_option(fields)
        if self._fields.get("too_stale") == "finish":
            raise ConfigurationError(
                "too_stale is 'finish', which prime-rl does not take: its group's mean leaves out a "
                "rollout without trained tokens. Use 'refuse', and prime-rl's max_off_policy_steps"
            )

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Never called: Perdure runs its own agent."""
        raise NotImplementedError

    async def run_episode(
        self,
        task: vf.Task,
        ctx: ModelContext,
        *,
        on_trace: Watch | None = None,
        on_discard: Watch | None = None,
    ) -> vf.Episode:
        """Run one rollout. Without a verdict, the episode has an error and no reward, and its group
        leaves it out. Raises: ConfigurationError."""
        about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = resolve_agent(
            self.config.agent,
            model=ctx.model,
            client=ctx.client,
            sampling=ctx.sampling,
            harness=default_agent_harness(self.config.taskset.id),
        )
        trace = vf.Trace(task=about, agent=AgentInfo(config=agent))
        episode = vf.Episode(env=EnvInfo(id=self.config.env_id), task=about, traces=[trace])
        if on_trace is not None:
            on_trace(trace)
        request = self._request(task, agent.sampling)
        client = ctx.client
        if self._uses_trainers and client.type == "train" and "base_url" in client.model_fields_set:
            model = await trainer_engine.name_server(client.base_url, ctx.model)
            request = request.model_copy(update={"model": model})
        replaces = self._without_verdict == "replace"
        found = await trainer_hooks.finished(request, replaces=replaces)
        if found is None or found.episode.reward is None:
            error = _no_reward(found)
            trace.errors.append(error)
            episode.errors.append(error)
        else:
            _fill(trace, found, await read_turns(found.episode))
        trace.is_completed = True
        trace.ok = episode.ok = not trace.errors
        return episode

    def _rows_dataset(self) -> str | None:
        path = getattr(self.config.taskset, "path", "")
        return dataset_name(path) if path else None

    def _request(self, task: vf.Task, sampling: Any) -> Any:
        self._samples[task.key] += 1
        return trainer_hooks.request_of(
            {
                **self._fields,
                "run_id": self.config.run_id,
                "dataset": self.config.dataset or self._rows_dataset(),
            },
            step=self._process,
            instance=task.data.row,
            sample_index=self._samples[task.key] - 1,
            sampling=trainer_hooks.sampling_of(sampling.model_dump() if sampling else {}),
        )


def _no_reward(found: EpisodeSegments | None) -> Error:
    if found is None:
        return Error(type="NoResult", message="the rollout ended without an episode")
    if failure := found.episode.failure:
        return Error(type=failure.type, message=failure.message)
    return Error(type="NoResult", message=found.episode.why_no_reward)


def _fill(trace: vf.Trace, found: EpisodeSegments, turns: Sequence[Turn]) -> None:
    known, said = {turn.index: turn for turn in turns}, conversations(turns)
    experts = segment_experts(turns, found.segments)
    for segment, rows in zip(found.segments, experts, strict=True):
        _add_branch(trace, [known[index] for index in segment.turns], said, rows)
    episode = found.episode
    trace.record_reward("graded", episode.reward)
    trace.record_metrics(_metrics(episode))
    trace.info = {"rollout": episode.rollout_id, "outcome": episode.outcome}


def _metrics(episode: Episode) -> dict[str, float]:
    dense = episode.rewards.partial if episode.rewards else 0.0
    return {
        "perdure_partial": dense,
        "perdure_segments": float(len(episode.segments)),
        "perdure_attempts": float(len(episode.attempts)),
        "perdure_engine_s": episode.engine_seconds,
        "perdure_environment_s": episode.environment_seconds,
        **{f"perdure_reward_{name}": value for name, value in episode.named_rewards.items()},
    }


def _add_branch(
    trace: vf.Trace,
    turns: Sequence[Turn],
    said: Mapping[int, Sequence[Mapping[str, Any]]],
    experts: ExpertRows | None,
) -> None:
    """Add a segment's own nodes: an answer that another segment has as context is trained once.

    `experts`: shape [L - 1, layers, top_k]. Like verifiers (`_attribute_routed_experts`), the branch's last
    token, which no engine read, gets a copy of the row before it.
    """
    if experts is not None:
        experts = experts[[*range(len(experts)), -1]]
    parent: int | None = None
    held = spoken = 0
    for turn in turns:
        messages = said[turn.index][spoken:] or [{"role": "user", "content": ""}]
        for message in messages[:-1]:
            parent = _add(trace, parent, message)
        asked = len(turn.prompt_ids)
        ends = asked + len(turn.completion_ids)
        parent = _add(trace, parent, messages[-1], turn.prompt_ids[held:])
        parent = _add(trace, parent, answer_of(turn), turn.completion_ids, turn.logprobs)
        if experts is not None:
            trace.nodes[-2].routed_experts = experts[held:asked].copy()
            trace.nodes[-1].routed_experts = experts[asked:ends].copy()
        if turn.kept_tokens is not None:
            kept = turn.kept_tokens
            trace.nodes[-1].sampling_mask = SamplingMask(kept.ids().copy(), kept.counts().copy())
        told = turn.sampling and vf.SamplingConfig(**turn.sampling.model_dump(mode="json"))
        trace.calls.append(ModelCall(node=parent, finish_reason=_reason(turn), sampling=told))
        held = ends
        spoken = len(said[turn.index]) + 1


def _add(
    trace: vf.Trace,
    parent: int | None,
    message: Mapping[str, Any],
    ids: Sequence[int] = (),
    logprobs: Sequence[float] | None = None,
) -> int:
    """Add a node. `logprobs`: only for an answer that the policy sampled. The last message of a prompt
    holds all of its tokens."""
    sampled = logprobs is not None
    trace.nodes.append(
        MessageNode(
            parent=parent,
            message=_message(message),
            sampled=sampled,
            token_ids=list(ids),
            mask=[sampled] * len(ids),
            logprobs=list(logprobs or ()),
        )
    )
    return len(trace.nodes) - 1


def _message(message: Mapping[str, Any]) -> Any:
    """Convert a message from the gateway's form (OpenAI's) to verifiers' form."""
    calls = [
        {"id": call.get("id", ""), **{k: call["function"][k] for k in ("name", "arguments")}}
        for call in message.get("tool_calls") or ()
    ]
    told = {**message, "tool_calls": calls} if calls else dict(message)
    if told.get("role") == "tool":
        told.setdefault("tool_call_id", "")
    if told.get("role") not in ("system", "user", "assistant", "tool"):
        told["role"] = "user"
    if told["role"] != "assistant":
        told["content"] = told.get("content") or ""
    return TypeAdapter(Message).validate_python(told)


def _reason(turn: Turn) -> str:
    return "length" if turn.finish_reason is FinishReason.LENGTH else "stop"
