"""Runs the trainers' own normalisation over Perdure's rows, and prints each rollout's advantage as JSON.

    python tests/real/trainers/advantages.py SLIME PRIME_RL [dense | choices]

In the environment of the trainers; SLIME and PRIME_RL are sources. `dense`: the second rollout fixed half of its tests.
`choices`: of a group with a missing and a stale member, each row's advantage and number of trained tokens, by
trainer and `without_verdict`. TorchTitan's parts are imported. Modules of the
others want GPUs, Ray and more, so their functions are taken out of their source files, unaltered but for
their decorators.
"""

# mypy: ignore-errors

import ast
import asyncio
import json
import logging
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from perdure.episodes import trainer_formats
from perdure.episodes.episode import (
    Episode,
    EpisodeParts,
    EpisodeSegments,
    build_episode,
    trained,
)
from perdure.episodes.trajectory_segments import RewardShare, cut
from perdure.errors import ConfigurationError, NoResult
from perdure.integrations import slime as hooks
from perdure.integrations import trainer_hooks
from perdure.types import (
    Failure,
    Grade,
    Outcome,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    Turn,
    VersionSpan,
)

FOLDERS = {"slime": Path(sys.argv[1]), "prime_rl": Path(sys.argv[2], "src")}
"""Where a package is, if it is not installed."""
SECOND = 0.5 if "dense" in sys.argv else 1.0
ENDS: tuple[tuple[float | None, int], ...] = ((1.0, 1), (SECOND, 3), (0.0, 1), (None, 1))
"""Reward and segments of each rollout of the group: the second has two sub-agents, the last failed."""


def source(path: str) -> str:
    folder = FOLDERS.get(path.partition("/")[0], Path(sysconfig.get_path("purelib")))
    return (folder / path).read_text()


def taken(path: str, *names: str, given: dict[str, Any]) -> SimpleNamespace:
    """Functions and classes of a source file, with `given` as their globals."""
    tree = ast.parse(source(path))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [one for one in ast.walk(tree) if isinstance(one, kinds) and one.name in names]
    for one in found:
        one.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    space = dict(given)
    exec(compile(ast.Module([*future, *found], []), path, "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def recorded(segments: int) -> tuple[Turn, ...]:
    """Turns that do not extend each other."""
    return tuple(
        Turn(
            index=n,
            prompt_ids=(10 + n,),
            completion_ids=(1, 2),
            logprobs=(-0.1, -0.2),
            versions=(VersionSpan(version=4, start=0, end=2),),
        )
        for n in range(segments)
    )


def rollout(
    index: int, reward: float | None, segments: int, *, stale: bool = False
) -> EpisodeSegments:
    """`stale`: version 3 was to sample it, and version 4 did."""
    age = {"policy_version": 3, "max_staleness": 0, "too_stale": "finish"} if stale else {}
    turns = recorded(segments)
    grade = None
    if reward is not None:
        outcome = Outcome.RESOLVED if reward == 1 else Outcome.UNRESOLVED
        rewards = Rewards(binary=float(reward == 1), partial=reward)
        grade = Grade(outcome=outcome, rewards=rewards, reward_form="partial")
    parts = EpisodeParts(
        request=RolloutRequest(run_id="r", instance="d/i", sample_index=index, **age),
        status=RolloutStatus.FAILED if grade is None else RolloutStatus.GRADED,
        failure=None if grade else Failure(boundary="sandbox", type="SandboxLost", message="gone"),
        grade=grade,
        started_at=0.0,
        finished_at=1.0,
        turns=turns,
    )
    found = cut(turns)
    episode = build_episode(parts, found)
    return EpisodeSegments(episode, tuple(trained(found, episode.too_stale)))


GROUP = [rollout(n, *end) for n, end in enumerate(ENDS)]
STALE = rollout(3, 1.0, 2, stale=True)
SHORT = [rollout(0, 1.0, 1), rollout(1, 0.0, 1), rollout(2, None, 1), STALE]
REPLACED = [*SHORT[:2], rollout(2, 0.0, 1), STALE]
Rows = list[list[tuple[float, int]]]
"""Of each row of each rollout: its advantage, and its trained tokens."""


# --- slime -----------------------------------------------------------------------------------


def slime(share: RewardShare, hook: Any = None, group: Sequence[EpisodeSegments] = GROUP) -> Rows:
    from slime.utils.types import Sample

    rows = [
        trainer_formats.slime_samples(one.shared(share), index=n, group_index=0)
        for n, one in enumerate(group)
    ]
    samples = [Sample.from_dict(row) for made in rows for row in made]
    args = SimpleNamespace(
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=False,
        n_samples_per_prompt=len(group),
        rollout_batch_size=1,
        reward_key=None,
    )
    manager = SimpleNamespace(args=args, custom_reward_post_process_func=hook)
    real = taken("slime/ray/rollout.py", "_post_process_rewards", given={"torch": torch})
    _, advantages = real._post_process_rewards(manager, samples)
    masks = [row["loss_mask"] for made in rows for row in made]
    return _by_rollout(advantages, masks, [len(made) for made in rows])


def slime_with_null() -> str:
    """What a reward of None did to a step."""
    args = SimpleNamespace(advantage_estimator="grpo", rewards_normalization=True)
    manager = SimpleNamespace(args=args, custom_reward_post_process_func=None)
    sample = SimpleNamespace(get_reward_value=lambda _: None)
    real = taken("slime/ray/rollout.py", "_post_process_rewards", given={"torch": torch})
    try:
        real._post_process_rewards(manager, [sample])
    except TypeError as error:
        return str(error)
    return "no error"


# --- SkyRL -----------------------------------------------------------------------------------


class Batch(dict[str, Any]):
    """A `TrainingInputBatch` as the trainer's function reads it."""

    metadata: dict[str, Any]

    def to(self, _: str) -> "Batch":
        return self


def skyrl(group: Sequence[EpisodeSegments | None] = GROUP, **options: Any) -> Rows:
    names = [{"instance_id": "i", "repetition_id": n} for n in range(len(group))]
    output = trainer_formats.skyrl_output(group, names=names, **options)
    given = {"torch": torch, "np": np, "defaultdict": defaultdict, "logger": logging.getLogger()}
    estimator = taken(
        "skyrl/backends/skyrl_train/utils/ppo_utils.py",
        "compute_grpo_outcome_advantage",
        given=given,
    ).compute_grpo_outcome_advantage
    utils = SimpleNamespace(
        compute_advantages_and_returns=lambda adv_estimator, **fields: estimator(**fields)
    )
    path, name = "skyrl/train/trainer.py", "compute_advantages_and_returns"
    real = taken(path, name, given={**given, "ppo_utils": utils})
    algorithm = SimpleNamespace(
        advantage_estimator="grpo", gamma=1.0, lambd=1.0, grpo_norm_by_std=False
    )
    config = SimpleNamespace(
        generator=SimpleNamespace(step_wise_trajectories=True),
        trainer=SimpleNamespace(algorithm=algorithm),
    )
    data = Batch(
        rewards=_padded(output["rewards"]), response_mask=_padded(output["loss_masks"]), values=None
    )
    data.metadata = {
        "uids": ["i"] * len(output["rewards"]),
        "is_last_step": output["is_last_step"],
        "avg_response_length": 0.0,
    }
    trainer = SimpleNamespace(cfg=config, all_metrics={})
    advantages = real.compute_advantages_and_returns(trainer, data)["advantages"]
    members = [one["repetition_id"] for one in output["trajectory_ids"]]
    sizes = [members.count(member) for member in dict.fromkeys(members)]
    return _by_rollout(advantages[:, 0].tolist(), output["loss_masks"], sizes)


def skyrl_dropping() -> Rows:
    from perdure.integrations.skyrl import _whole_groups

    names = [SimpleNamespace(instance_id="i") for _ in SHORT]
    return skyrl(_whole_groups({"trajectory_ids": names}, SHORT))


# --- verl ------------------------------------------------------------------------------------


class Proto:
    """A `DataProto` as verl's functions read it."""

    def __init__(self, batch: dict[str, Any], uids: Any) -> None:
        self.batch = batch
        self.non_tensor_batch = {"uid": uids}

    def __len__(self) -> int:
        return len(self.non_tensor_batch["uid"])

    def select_idxs(self, rows: list[int]) -> "Proto":
        batch = {name: value[rows] for name, value in self.batch.items()}
        return Proto(batch, self.non_tensor_batch["uid"][rows])


async def verl(group: Sequence[EpisodeSegments] = GROUP) -> Rows:
    """Through the agent loop worker's own processing, then the trainer's."""
    keys, fields = await _put_in_queue(group)
    data = Proto(
        {
            "token_level_rewards": _padded([field["rm_scores"].tolist() for field in fields]),
            "response_mask": _padded([field["response_mask"].tolist() for field in fields]),
        },
        np.array(["uid"] * len(keys)),
    )
    estimators = SimpleNamespace(GAE="gae", GRPO="grpo")
    space = {"torch": torch, "np": np, "defaultdict": defaultdict, "AdvantageEstimator": estimators}
    name = "compute_grpo_outcome_advantage"
    core = taken("verl/trainer/ppo/core_algos.py", name, given=space)
    core.AdvantageEstimator = estimators
    space["core_algos"] = core
    name = "compute_advantage"
    space[name] = taken("verl/trainer/ppo/ray_trainer.py", name, given=space).compute_advantage
    name = "compute_advantage_for_multi_trajectories"
    real = taken("verl/trainer/ppo/v1/utils.py", name, given=space)
    done = getattr(real, name)(data, keys, "grpo", norm_adv_by_std_in_grpo=False)
    masks = [field["response_mask"].tolist() for field in fields]
    sessions = [key.rpartition("_")[0] for key in keys]
    sizes = [sessions.count(session) for session in dict.fromkeys(sessions)]
    return _by_rollout(done.batch["advantages"][:, 0].tolist(), masks, sizes)


async def _put_in_queue(
    group: Sequence[EpisodeSegments],
) -> tuple[list[str], list[dict[str, Any]]]:
    from typing import Optional

    from pydantic import BaseModel

    keys: list[str] = []
    fields: list[dict[str, Any]] = []

    async def put(keys: list[str], fields: Any, **_: Any) -> None:
        put_keys.extend(keys)
        put_fields.extend(fields)

    put_keys, put_fields = keys, fields
    given = {"torch": torch, "BaseModel": BaseModel, "Any": Any, "Optional": Optional}
    types = taken(
        "verl/experimental/agent_loop/agent_loop.py",
        *("AgentLoopMetrics", "AgentLoopOutput"),
        given=given,
    )
    types.AgentLoopOutput.model_rebuild(_types_namespace={**given, **vars(types)})
    queue = SimpleNamespace(async_kv_batch_put=put)
    given |= {"tq": queue, "list_of_dict_to_tensordict": list, "logger": logging.getLogger()}
    path, name = "verl/trainer/ppo/v1/agent_loop_tq.py", "_agent_loop_postprocess"
    real = taken(path, name, given=given)
    worker = SimpleNamespace(
        _compute_score=_nothing,
        _compute_teacher_logprobs=_nothing,
        _compute_multi_modal_inputs=lambda *_: {},
        _compute_position_ids=lambda ids, *_: torch.zeros_like(ids),
    )
    for n, one in enumerate(group):
        outputs = [types.AgentLoopOutput(**row) for row in trainer_formats.verl_outputs(one)]
        row = {"uid": "uid", "session_id": n, "global_steps": 0}
        await real._agent_loop_postprocess(worker, outputs, False, **row)
    return keys, fields


async def _nothing(*_: Any, **__: Any) -> None:
    return None


# --- TRL -------------------------------------------------------------------------------------


def trl(group: Sequence[EpisodeSegments | None] = GROUP) -> Rows:
    """The statements of `_generate_and_score_completions` from rewards to advantages."""
    output = trainer_formats.trl_output(group)
    known = [float("nan") if one is None else one for one in output["perdure_reward"]]
    space = {
        "torch": torch,
        "nanstd": taken("trl/trainer/utils.py", "nanstd", given={"torch": torch}).nanstd,
        "rewards_per_func": torch.tensor(known).unsqueeze(1),
        "num_generations": len(group),
        "device": "cpu",
        "self": SimpleNamespace(
            multi_objective_aggregation="sum_then_normalize",
            reward_weights=torch.ones(1),
            scale_rewards="none",
            reward_funcs=[None],
        ),
    }
    tree = ast.parse(source("trl/trainer/grpo_trainer.py"))
    (method,) = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef) and one.name == "_generate_and_score_completions"
    ]
    texts = [ast.unparse(one) for one in method.body]
    first = next(n for n, text in enumerate(texts) if text.startswith("unscorable_mask ="))
    last = next(n for n, text in enumerate(texts) if n > first and "nan_to_num" in text)
    exec("\n".join(texts[first : last + 1]), space)
    advantages: torch.Tensor = space["advantages"]
    return _by_rollout(advantages.tolist(), output["env_mask"], [1] * len(group))


def trl_dropping() -> Rows:
    from perdure.integrations.trl import _whole_groups

    return trl(_whole_groups([0] * len(SHORT), SHORT))


# --- TorchTitan ------------------------------------------------------------------------------


@dataclass
class Told:
    """The controller's sampling parameters."""

    temperature: float = 1.0


async def torchtitan(group: Sequence[EpisodeSegments] = GROUP, choice: str = "short") -> Rows:
    """Through the hook, with TorchTitan's rubric and estimator, then its sample builder. Rollouts and
    turns are given instead of played and read."""
    import absent

    absent.stand_in(absent.TORCHTITAN)
    from torchtitan.experiments.rl.components.training_sample_builder import (
        TrainingSampleBuilder,
    )

    from perdure.integrations.torchtitan import rollouter as hook

    async def finished(request: RolloutRequest, **_: Any) -> EpisodeSegments:
        return group[request.sample_index]

    async def read_turns(episode: Episode) -> tuple[Turn, ...]:
        return recorded(len(group[episode.sample_index].segments))

    trainer_hooks.finished, hook.read_turns = finished, read_turns
    more = json.dumps({"engine": "perdure", "without_verdict": choice})
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as rows:
        rows.write(json.dumps({"instance": "d/i"}))
        rows.flush()
        config = hook.PerdureRollouter.Config(
            run_id="r",
            train_dataset=hook.Instances.Config(path=rows.name),
            validation_dataset=hook.Instances.Config(path=rows.name, shuffle=False),
            rollout=hook.RolloutFields(more=more),
        )
        rollouter = hook.PerdureRollouter(config)
    try:
        made = await rollouter.run_group_rollouts(
            generate_fn=None,
            sample={"instance": "d/i"},
            group_id=0,
            group_size=len(group),
            sampling=Told(),
        )
    except NoResult:
        return []
    built = TrainingSampleBuilder.Config().build().build_from_group(rollout_group=made)
    found: dict[int, list[tuple[float, int]]] = {}
    for sample in built.training_samples:
        told = max(sample.advantage, key=abs), int(sum(sample.loss_mask))
        found.setdefault(sample.rollout_id.rollout_id, []).append(told)
    return list(found.values())


# --- prime-rl --------------------------------------------------------------------------------


PERDURE_ENV = """from perdure.integrations.verifiers import Instances, PerdureEnv
__all__ = ["Instances", "PerdureEnv"]
"""


async def prime_rl(group: Sequence[EpisodeSegments] = GROUP, **fields: str) -> Rows:
    """Through the hook's environment, then prime-rl's GRPO and its choice of what is trained. Rollouts
    and turns are given instead of played and read."""
    import verifiers.v1 as vf
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    from perdure.integrations import verifiers as hook

    async def finished(request: RolloutRequest, **_: Any) -> EpisodeSegments:
        return group[request.sample_index]

    async def read_turns(episode: Episode) -> tuple[Turn, ...]:
        return recorded(len(group[episode.sample_index].segments))

    trainer_hooks.finished, hook.read_turns = finished, read_turns
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        rows.write_text(json.dumps({"instance": "d/i"}))
        Path(folder, "perdure_env.py").write_text(PERDURE_ENV)
        sys.path.insert(0, folder)
        config = {"taskset": {"id": "perdure_env", "path": str(rows)}, "run_id": "r"}
        config["rollout"] = {"engine": "perdure", **fields}
        env = load_environment(resolve_env_config(config))
        (task,) = env.taskset
    ctx = ModelContext(model="policy", client=vf.TrainClientConfig(), sampling=vf.SamplingConfig())
    episodes = [await env.run_episode(task, ctx) for _ in group]

    given: dict[str, Any] = {"torch": torch, "vf": vf, "Algorithm": object}
    for path, *names in (
        ("algo/base.py", "iter_trainable_traces"),
        ("algo/routing.py", "assign_advantages"),
        ("algo/grpo.py", "GRPOAlgorithm"),
    ):
        given |= vars(taken(f"prime_rl/orchestrator/{path}", *names, given=given))
    await given["GRPOAlgorithm"].score_group(SimpleNamespace(length_penalty=None), episodes)
    path, name = "prime_rl/orchestrator/trajectories.py", "iter_trainable_branches"
    real = taken(path, name, given=given)
    survivors = [trace.id for _, trace in given["iter_trainable_traces"](episodes)]
    made = []
    for episode in episodes:
        (trace,) = episode.traces
        branches = real.iter_trainable_branches(trace) if trace.id in survivors else ()
        made.append([(max(one.advantages, key=abs), sum(mask)) for one, mask in branches])
    return made


def prime_rl_finishing() -> str:
    try:
        asyncio.run(prime_rl(too_stale="finish"))
    except ConfigurationError as error:
        return str(error)
    return "no error"


def _padded(rows: list[list[float]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[float(v) for v in row] + [0.0] * (width - len(row)) for row in rows])


def _by_rollout(values: list[float], masks: list[list[int]], sizes: list[int]) -> Rows:
    rows = iter([(value, int(sum(mask))) for value, mask in zip(values, masks, strict=True)])
    return [[next(rows) for _ in range(size)] for size in sizes]


def _advantages(rows: Rows) -> list[list[float]]:
    return [[advantage for advantage, _ in own] for own in rows]


def slimes() -> dict[str, Any]:
    return {
        "slime": _advantages(slime("full", hooks.rewards)),
        "slime, without the hook": _advantages(slime("full")),
        "slime, split": _advantages(slime("split", group=[GROUP[1], GROUP[2], GROUP[0], GROUP[0]])),
        "slime, reward None": slime_with_null(),
    }


def choices() -> dict[str, Any]:
    """By trainer, then by `without_verdict`."""
    clones: dict[str, Any] = {}
    if FOLDERS["slime"].exists():
        clones["slime"] = {
            "mask": slime("full", hooks.rewards, SHORT),
            "replace": slime("full", hooks.rewards, REPLACED),
        }
    if FOLDERS["prime_rl"].exists():
        clones["prime-rl"] = {
            "short": asyncio.run(prime_rl(SHORT[:3])),
            "replace": asyncio.run(prime_rl(REPLACED[:3])),
            "finish": prime_rl_finishing(),
        }
    return clones | {
        "skyrl": {
            "short": skyrl(SHORT),
            "mask": skyrl(SHORT, masks=True),
            "replace": skyrl(REPLACED),
            "drop": skyrl_dropping(),
        },
        "verl": {"short": asyncio.run(verl(SHORT)), "replace": asyncio.run(verl(REPLACED))},
        "trl": {"mask": trl(SHORT), "replace": trl(REPLACED), "drop": trl_dropping()},
        "torchtitan": {
            "short": asyncio.run(torchtitan(SHORT)),
            "replace": asyncio.run(torchtitan(REPLACED)),
            "drop": asyncio.run(torchtitan(SHORT, "drop")),
        },
    }


def rewards() -> dict[str, Any]:
    return {
        **(slimes() if FOLDERS["slime"].exists() else {}),
        **(
            {"prime-rl": _advantages(asyncio.run(prime_rl()))}
            if FOLDERS["prime_rl"].exists()
            else {}
        ),
        "skyrl": _advantages(skyrl()),
        "verl": _advantages(asyncio.run(verl())),
        "trl": _advantages(trl()),
        "torchtitan": _advantages(asyncio.run(torchtitan())),
    }


if __name__ == "__main__":
    print(json.dumps(choices() if "choices" in sys.argv else rewards()))
