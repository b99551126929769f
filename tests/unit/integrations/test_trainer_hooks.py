"""The names that a trainer's launcher is given: a row goes in, the rollout's samples come out."""

import asyncio
import base64
import dataclasses
import importlib
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy
import pytest
import pytest_asyncio

from perdure.client.request_defaults import rollout_with_defaults
from perdure.dialects.base import Refused
from perdure.engines.function_engine import Ask, Sampled
from perdure.episodes import turns_parquet
from perdure.episodes.episode import AttemptSummary, EpisodeParts
from perdure.episodes.trajectory_segments import cut
from perdure.errors import Boundary, ConfigurationError, NoResult
from perdure.instances import instance_catalog
from perdure.integrations import (
    skyrl,
    slime,
    trainer_engine,
    trainer_hooks,
    trl,
    trl_generation,
    trl_weights,
)
from perdure.sandboxes.base import identity_of
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.types import (
    EpisodeRef,
    Failure,
    FinishReason,
    Grade,
    Outcome,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    RoutedExperts,
    Turn,
)
from perdure.types.kept_tokens import KeptTokens
from tests import docs_pages
from tests.checkout_paths import ROOT
from tests.stack.wait_until import PATIENCE_S, until
from tests.stored_episodes import store_episode
from tests.unit.instances import test_multi_swe
from tests.unit.instances.made_rows import r2e_row
from tests.unit.instances.test_rows import ROW
from tests.unit.integrations import stand_ins

LOST = Failure(boundary=Boundary.SANDBOX, type="SandboxLost", message="gone")
SAMPLING = {
    "temperature": 0.8,
    "top_p": 1.0,
    "top_k": 50,
    "max_new_tokens": 4096,
    "stop": None,
    "stop_token_ids": [248046, 248044],
    "no_stop_trim": True,
}


def turns(segments: int) -> tuple[Turn, ...]:
    """As many segments as there are turns: no prompt extends another."""
    return tuple(
        Turn(index=n, prompt_ids=(10 + n,), completion_ids=(1, 2), logprobs=(-0.1, -0.2))
        for n in range(segments)
    )


async def episode(
    store: LocalStore,
    request: RolloutRequest,
    reward: float | None,
    segments: int,
    routed: int = 0,
    *,
    kept: int = 0,
    attempts: int = 0,
) -> EpisodeRef:
    """`routed`: how many of its segments have experts: 5 in the first layer, 6 in the second. `kept`: how
    many have kept sets."""
    experts = RoutedExperts.of(numpy.tile([[[5, 7], [6, 7]]], (2, 1, 1)), start=0)
    taken = tuple(
        one.model_copy(
            update={
                "routed_experts": experts if one.index < routed else None,
                "kept_tokens": KeptTokens.of([[1, 7], [2]]) if one.index < kept else None,
            }
        )
        for one in turns(segments)
    )
    key = f"{store_keys.rollout(request.run_id, 'i', request.sample_index)}/turns.parquet"
    await store.put(key, turns_parquet.encode(taken))
    grade = None
    if reward is not None:
        outcome = Outcome.RESOLVED if reward else Outcome.UNRESOLVED
        grade = Grade(outcome=outcome, rewards=Rewards(binary=reward))
    parts = EpisodeParts(
        request=request,
        status=RolloutStatus.FAILED if grade is None else RolloutStatus.GRADED,
        failure=LOST if grade is None else None,
        grade=grade,
        started_at=0.0,
        finished_at=1.0,
        attempts=[AttemptSummary(attempt=number) for number in range(1, attempts + 1)],
        turns=taken,
        workflow_run_id=f"play-{request.round}",
        turns_key=key,
    )
    found = cut(taken)
    return (await store_episode(store, parts, found)).ref(store.url)


class Stack:
    """Plays Perdure: each rollout ends at once, by its sample index, as `ends` says."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store
        self.ends: dict[int, tuple[float | None, int] | None] = {}
        """Reward and number of segments; None: it ends without an episode. Others run for ever."""
        self.replaced: dict[int, tuple[float | None, int]] = {}
        """How a later round of a sample ends, if not as its first one."""
        self.routed = 0
        """How many segments of each rollout have experts."""
        self.kept = 0
        """How many have kept sets."""
        self.attempts = 0
        self.requests: list[RolloutRequest] = []
        self.cancelled: list[str] = []
        config = SimpleNamespace(target_host="127.0.0.1:7233")
        self.client = SimpleNamespace(service_client=SimpleNamespace(config=config))

    async def start_rollout(self, request: RolloutRequest) -> "Stack.Handle":
        self.requests.append(request)
        return Stack.Handle(self, request)

    class Handle:
        def __init__(self, stack: "Stack", request: RolloutRequest) -> None:
            self.stack = stack
            self.request = request

        async def result(self) -> EpisodeRef:
            if self.request.sample_index not in self.stack.ends:
                await asyncio.Event().wait()
            end = self.stack.ends[self.request.sample_index]
            if self.request.round:
                end = self.stack.replaced.get(self.request.sample_index, end)
            if end is None:
                raise NoResult("terminated")
            stack = self.stack
            return await episode(
                *(stack.store, self.request, *end, stack.routed),
                kept=stack.kept,
                attempts=stack.attempts,
            )

        async def cancel(self) -> None:
            self.stack.cancelled.append(self.request.workflow_id)


@pytest_asyncio.fixture(autouse=True)
async def _engines(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Stops the engines of a test at its end."""
    made: dict[str, trainer_engine.TrainerEngine] = {}
    monkeypatch.setattr(trainer_engine, "_engines_by_run", made)
    yield
    for engine in made.values():
        await engine.stop()


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERDURE_STORE", str(tmp_path / "store"))
    made = Stack(LocalStore(tmp_path / "store"))

    async def connection() -> Any:
        return made

    monkeypatch.setattr(trainer_hooks, "connection", connection)
    with stand_ins.installed(tmp_path / "trainers", monkeypatch):
        yield made


# --- requests -------------------------------------------------------------------------------


def test_the_trainers_sampling_wins() -> None:
    """What the loss is computed with is what is sampled; the rest of the configured rules stay."""
    request = trainer_hooks.request_of(
        {"run_id": "r", "sampling": {"temperature": 0.1, "max_context_tokens": 5}},
        step="7",
        instance="d/i",
        sample_index=2,
        sampling=trainer_hooks.sampling_of(SAMPLING),
    )

    assert (request.run_id, request.sampling.temperature) == ("r-7", 0.8)
    assert (request.sampling.max_context_tokens, request.sampling.max_tokens_per_turn) == (5, 4096)
    assert request.sampling.stop_token_ids == (248046, 248044)


@pytest.mark.parametrize(
    ("row", "instance"),
    [
        ({"instance": "d/i"}, "d/i"),
        ({"instance_id": "i"}, "set/i"),
        ({"instance_id": "o/r:1"}, "set/o-r-1"),
        (r2e_row(), "set/calc__bbbbbbbbbbbb"),
        ({"instance": {"instance_id": "i"}, "data_source": "swe-gym"}, "set/i"),
    ],
)
def test_a_row_names_its_instance(row: dict[str, Any], instance: str) -> None:
    """By reference, or by id in the dataset of the configuration, also of a row within the row, as in SkyRL's
    coding example."""
    fields = {"run_id": "r", "dataset": "set"}
    request = trainer_hooks.request_of(fields, step="0", instance=row, sample_index=0, sampling={})

    assert request.instance == instance


@pytest.mark.parametrize(
    ("fields", "row", "problem"),
    [
        ({}, {"instance": "d/i"}, "needs a `run_id`"),
        ({"run_id": "r"}, {"image": "x"}, "needs `instance` .* This row has image.* no `dataset`"),
        ({"run_id": "r", "dataset": "d"}, {"image": "x"}, "`instance_id` .* This row has image$"),
    ],
)
def test_what_is_missing_is_named(fields: Any, row: Any, problem: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigurationError, match=problem):
        trainer_hooks.request_of(fields, step="0", instance=row, sample_index=0, sampling={})


async def verl_gets(row: dict[str, Any]) -> None:
    """In verl's column `extra_info`, beside the name of verl's own reward function."""
    loop = verl_loop(engine="perdure", dataset="set")
    await loop.run({}, extra_info=row, data_source="my-rewards")


async def verl_gets_columns(row: dict[str, Any]) -> None:
    """As verl reads a parquet file: its lists are numpy arrays, also in nested columns."""
    loop = verl_loop(engine="perdure", dataset="set")
    await loop.run({}, **_arrays(row), data_source="my-rewards")


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _arrays(one) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    array = numpy.empty(len(value), object)
    array[:] = [_arrays(one) for one in value]
    return array


async def slime_gets(row: dict[str, Any]) -> None:
    """As slime's `--metadata-key` reads it."""
    sample = slime_sample(0)
    sample.metadata = row
    sample.label = None
    await slime.generate(slime_args(), sample, dict(SAMPLING))


async def skyrl_gets(row: dict[str, Any]) -> None:
    made = skyrl.generator(
        SimpleNamespace(step_wise_trajectories=True), run_id="try", engine="perdure", dataset="set"
    )
    await made.generate({**skyrl_batch(0), "env_extras": [{"instance": row}]})


async def torchtitan_gets(row: dict[str, Any]) -> None:
    from perdure.integrations.torchtitan.rollouter import PerdureRollouter, RolloutFields

    fields = RolloutFields(more='{"engine": "perdure"}')
    config = PerdureRollouter.Config(dataset="set", rollout=fields)
    (request,) = PerdureRollouter(config)._requests(row, 0, 1, TitanSampling())
    await trainer_hooks.finished(request)


async def trl_gets(row: dict[str, Any]) -> None:
    """As JSON, because TRL gives a rollout function nothing of a row but its prompt."""
    rollouts = trl.Rollouts(run_id="try", engine="perdure", publish=False, dataset="set")
    (request,) = rollouts._requests([json.dumps(row)], trl_trainer())
    await trainer_hooks.finished(request)


@pytest.mark.parametrize(
    ("row", "ref", "problem"),
    [
        (r2e_row(), "set/calc__bbbbbbbbbbbb", "add() subtracts."),
        (test_multi_swe.ROW, "set/cli__cli-10388", "It breaks\n\nOften."),
        (ROW, f"set/{ROW['instance_id']}", ROW["problem_statement"]),
    ],
    ids=["R2E-Gym", "Multi-SWE-bench", "SWE-bench"],
)
@pytest.mark.parametrize(
    "hook",
    [slime_gets, verl_gets, verl_gets_columns, skyrl_gets, torchtitan_gets, trl_gets],
    ids=lambda hook: str(hook.__name__),
)
async def test_a_hook_takes_the_datasets_row(
    stack: Stack, hook: Any, row: dict[str, Any], ref: str, problem: str
) -> None:
    """A complete row of a known format is put into the catalog when its first rollout starts."""
    stack.ends[0] = (1.0, 1)
    await hook(row)

    found = await instance_catalog.load(stack.store, ref)
    assert [request.instance for request in stack.requests] == [ref]
    assert found.problem_statement == problem


async def test_a_row_is_imported_once_by_content(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further samples of a row write nothing; a row whose content has changed replaces the earlier."""
    saved = []
    save = instance_catalog.save

    async def noted(store: Any, instance: Any) -> None:
        saved.append(instance.problem_statement)
        await save(store, instance)

    monkeypatch.setattr(instance_catalog, "save", noted)
    stack.ends[0] = (1.0, 1)
    for text in ("First.", "First.", "Second."):
        await verl_gets({**ROW, "problem_statement": text})

    assert saved == ["First.", "Second."]


async def test_slimes_own_row_is_imported(stack: Stack) -> None:
    """Prompt, label and metadata with a grader, as document 002 describes them."""
    stack.ends[0] = (1.0, 1)
    sample = slime_sample(0)
    sample.label = "owner/repo 1"
    sample.metadata = {"image": "swedev/x:1", "workdir": "/workspace/x", "eval_cmd": "pytest -x"}
    await slime.generate(slime_args(), sample, dict(SAMPLING))

    found = await instance_catalog.load(stack.store, "set/owner-repo-1")
    assert (found.problem_statement, found.environment.image) == ("Fix it.", "swedev/x:1")


async def test_slimes_launcher_needs_no_file_of_ours(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Document 002's launcher with only the module's name changed: agent, sandboxes, rows and run
    come from its own variables and flags."""
    monkeypatch.setenv("SWE_SANDBOX_METADATA_FILE", str(tmp_path / "metadata.json"))
    stack.ends |= {0: (1.0, 1), 1: (1.0, 1)}
    args = slime_args()
    args.perdure, args.prompt_data = None, "/path/to/swe_train.jsonl"
    made: dict[str, Any] = {"run_id": slime.RUN_ID, "engine": "perdure"}
    options, _ = slime._options(args)
    args.perdure = {**options, **made}
    for index in range(2):
        await slime.generate(args, slime_sample(index), dict(SAMPLING))

    assert [one.instance for one in stack.requests] == ["swe_train/i"] * 2
    assert {(one.agent, one.sandbox) for one in stack.requests} == {("claude_code", "e2b")}
    assert {one.run_id for one in stack.requests} == {f"{slime.RUN_ID}-3"}


# --- a member without a verdict ---------------------------------------------------------------


def hook(trainer: str, **fields: Any) -> Any:
    """What the trainer constructs or calls first, with these options."""
    if trainer == "slime":
        return slime._options(slime_args(fields))
    if trainer == "skyrl":
        return skyrl_generator(**fields)
    if trainer == "skyrl, not step-wise":
        return skyrl_generator(step_wise=False, **fields)
    if trainer == "verl":
        return verl_loop(engine="perdure", **fields)
    assert trainer == "trl"
    return trl.Rollouts(run_id="try", engine="perdure", **fields)


def skyrl_generator(step_wise: bool = True, **fields: Any) -> Any:
    config = SimpleNamespace(step_wise_trajectories=step_wise)
    return skyrl.generator(config, run_id="try", engine="perdure", **fields)


@pytest.mark.parametrize(
    ("trainer", "choice", "why"),
    [
        ("slime", "short", "reads a sample of each member. Use one of replace, drop, mask"),
        ("slime", "drop", "--dynamic-sampling-filter-path perdure.integrations.slime.has_signal"),
        ("skyrl, not step-wise", "short", "a row for each prompt"),
        ("verl", "mask", "counts the reward of each row"),
        ("verl", "drop", "only its asynchronous trainers"),
        ("trl", "short", "one row for each prompt"),
        ("trl", "zero", "Use one of replace, drop, mask"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused_at_its_start(
    stack: Stack, trainer: str, choice: str, why: str
) -> None:
    """By name and with the reason, before anything is started."""
    with pytest.raises(ConfigurationError, match=f"without_verdict is '{choice}'.*{why}"):
        hook(trainer, without_verdict=choice)

    assert stack.requests == []


@pytest.mark.parametrize("trainer", ["slime", "skyrl", "verl", "trl"])
@pytest.mark.parametrize("field", ["quorum", "deadline_s", "stragglers"])
def test_a_trainer_decides_how_long_it_waits(stack: Stack, trainer: str, field: str) -> None:
    """What only a group of Perdure's own has is refused by its name."""
    with pytest.raises(ConfigurationError, match=f"{field} is a field of a GroupRequest"):
        hook(trainer, **{field: 1})


def test_slimes_partial_rollouts_are_refused(stack: Stack) -> None:
    """slime would read a list as a sample, in the middle of its step."""
    args = slime_args(partial_rollout=True)
    with pytest.raises(ConfigurationError, match=r"--partial-rollout: .* one for each segment"):
        slime._options(args)


async def test_a_member_without_a_verdict_is_replaced(stack: Stack) -> None:
    """By the next round of the same rollout, so there is one replacement whoever starts it."""
    stack.ends[0], stack.replaced[0] = (None, 1), (1.0, 1)
    made = await slime.generate(
        slime_args({"without_verdict": "replace"}), slime_sample(0), dict(SAMPLING)
    )

    assert [(one.workflow_id, one.round) for one in stack.requests] == [
        ("rollout/try-3/i/0", 0),
        ("rollout/try-3/i/0", 1),
    ]
    assert [(s.reward, s.remove_sample) for s in made] == [(1.0, False)]


async def test_a_restarted_trainer_joins_the_replacement(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for the first round again and gets the one that runs, the third. One is left."""
    stack.ends[0] = (None, 1)
    start = stack.start_rollout

    async def joins(request: RolloutRequest) -> Stack.Handle:
        handle = await start(request)
        handle.request = request.model_copy(update={"round": max(2, request.round)})
        return handle

    monkeypatch.setattr(stack, "start_rollout", joins)
    await trainer_hooks.finished(RolloutRequest(run_id="r", instance="d/i"), replaces=True)

    assert [one.round for one in stack.requests] == [0, 3]


async def test_replacements_end(stack: Stack) -> None:
    """After three, the member is what it is by default."""
    stack.ends[0] = (None, 1)
    outputs = await verl_loop(engine="perdure", without_verdict="replace").run({}, instance="d/i")

    assert ([one.round for one in stack.requests], outputs) == ([0, 1, 2, 3], [])


async def test_a_trainer_that_has_given_up_replaces_nothing(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of slime that is aborted as its rollout fails buys no more tokens."""
    monkeypatch.setattr(trainer_hooks, "POLL_S", PATIENCE_S)
    stack.ends[0] = (None, 1)
    given_up = iter([False])
    request = RolloutRequest(run_id="r", instance="d/i")
    await trainer_hooks.finished(request, lambda: next(given_up, True), replaces=True)

    assert len(stack.requests) == 1


async def test_a_failure_that_would_repeat_is_not_replaced(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every engine is too new for the next round too."""
    stale = Failure(boundary=Boundary.ENGINE, type="PolicyTooStale", message="newer weights")
    monkeypatch.setattr("tests.unit.integrations.test_trainer_hooks.LOST", stale)
    stack.ends[0] = (None, 1)
    await trainer_hooks.finished(RolloutRequest(run_id="r", instance="d/i"), replaces=True)

    assert len(stack.requests) == 1


async def test_slime_drops_a_group_with_a_missing_member(stack: Stack) -> None:
    """Its filter says no, although the others differ; by default it keeps the group."""
    group = await slime_group(stack, (1.0, 1), (0.0, 1), (None, 1))
    args = slime_args({"without_verdict": "drop"}, dynamic_sampling_filter_path=slime.FILTER)

    assert (slime.has_signal(args, group), slime.has_signal(slime_args(), group)) == (False, True)
    assert slime.has_signal(args, group[:2])
    group[2][0].metadata["withheld"] = "exposed: a twin passed"  # it has a verdict
    assert slime.has_signal(args, group)


@pytest.mark.parametrize(
    ("choice", "rewards", "masks"),
    [
        ("short", [1.0, 0.0], [[1, 1], [1, 1]]),
        ("mask", [1.0, 0.0, 0.5], [[1, 1], [1, 1], [0]]),
        ("drop", [0.0, 0.0, 0.0], [[0], [0], [0]]),
    ],
)
async def test_skyrl_gets_each_choice(
    stack: Stack, choice: str, rewards: list[float], masks: list[list[int]]
) -> None:
    """A masked row has the mean of the others. A dropped group trains no token; it has rows only
    because SkyRL needs some in each batch."""
    stack.ends |= {0: (1.0, 1), 1: (0.0, 1), 2: (None, 1)}
    output = await skyrl_generator(without_verdict=choice).generate(skyrl_batch(0, 1, 2))

    assert [row[-1] for row in output["rewards"]] == rewards
    assert output["loss_masks"] == masks


async def test_verl_replaces_a_group_whose_loop_raises(stack: Stack) -> None:
    """With its asynchronous trainers only."""
    stack.ends[0] = (None, 1)
    loop = verl_loop(engine="perdure", without_verdict="drop", mode="separate_async")
    with pytest.raises(NoResult, match=r"rollout/.* has no verdict, so its group is dropped"):
        await loop.run({}, instance="d/i")


def test_trl_masks_the_group_of_a_missing_member(stack: Stack) -> None:
    """No member has a reward then, so all advantages are 0. A process with a part of a group would not
    know of the others."""
    stack.ends |= {0: (1.0, 1), 1: (None, 1)}
    rollouts = trl.Rollouts(run_id="try", engine="perdure", publish=False, without_verdict="drop")
    trainer = trl_trainer()
    trainer.num_generations = 2
    output = rollouts(["d/i", "d/i"], trainer)
    with pytest.raises(ConfigurationError, match="only a part of a group of 2"):
        rollouts(["d/i"], trainer)

    assert (output["perdure_reward"], output["env_mask"]) == ([None, None], [[0], [0]])


# --- slime -----------------------------------------------------------------------------------


def slime_args(options: Mapping[str, Any] | None = None, /, **more: Any) -> Any:
    """`options`: Perdure's."""
    own = {"run_id": "try", "dataset": "set", "agent": "nop", "engine": "perdure"}
    given = {
        "perdure": {**own, **(options or {})},
        "rollout_top_p": 1.0,
        "rollout_max_context_len": 96_000,
        "eval_max_context_len": 32_000,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": False,
    }
    return SimpleNamespace(**{**given, **more})


def slime_sample(index: int, group_index: int = 0) -> Any:
    from slime.utils.types import Sample

    return Sample(
        index=index,
        group_index=group_index,
        prompt="Fix it.",
        label="gold",
        metadata={"instance_id": "i", "source_name": "swe"},
    )


async def slime_group(stack: Stack, *ends: tuple[float | None, int] | None) -> list[list[Any]]:
    stack.ends |= dict(enumerate(ends))
    args = slime_args()
    return [await slime.generate(args, slime_sample(n), dict(SAMPLING)) for n in range(len(ends))]


async def test_slimes_launcher_names_generate(stack: Stack) -> None:
    """A sample becomes one per segment, with its own prompt, label and metadata and the tokens."""
    (made,) = await slime_group(stack, (1.0, 2))

    (request,) = stack.requests
    assert (request.run_id, request.instance, request.sampling.max_context_tokens) == (
        "try-3",
        "set/i",
        96_000,
    )
    assert [(s.tokens, s.reward, s.rollout_id) for s in made] == [
        ([10, 1, 2], 1.0, 0),
        ([11, 1, 2], 1.0, 0),
    ]
    assert {(s.prompt, s.label, s.metadata["source_name"]) for s in made} == {
        ("Fix it.", "gold", "swe")
    }


@pytest.mark.parametrize(
    ("label", "metadata", "instance"),
    [
        ("gold", {"remote_env_info": {"instance_id": "i"}}, "set/i"),
        ("owner/repo 1", {"image": "x", "eval_cmd": "true"}, "set/owner-repo-1"),
        ("gold", {"instance": "other/i"}, "other/i"),
    ],
)
async def test_a_row_of_slimes_example_is_found(
    stack: Stack, label: str, metadata: dict[str, Any], instance: str
) -> None:
    """By the id under which the import of its file keeps it: its own, or its label."""
    stack.ends[0] = (1.0, 1)
    sample = slime_sample(0)
    sample.label, sample.metadata = label, metadata
    await slime.generate(slime_args(), sample, dict(SAMPLING))

    assert stack.requests[0].instance == instance


async def test_an_evaluation_counts_a_rollout_once(stack: Stack) -> None:
    """slime averages over samples there, so there is one; its ids are apart from training's."""
    stack.ends[0] = (1.0, 3)
    made = await slime.generate(slime_args(), slime_sample(0), dict(SAMPLING), evaluation=True)

    assert [sample.reward for sample in made] == [1.0]
    assert (stack.requests[0].run_id, stack.requests[0].sampling.max_context_tokens) == (
        "try-eval-3",
        32_000,
    )


async def test_slimes_advantages_count_a_rollout_once(stack: Stack) -> None:
    """Of 1 segment resolved, 3 segments resolved, unresolved and failed: each resolved rollout gains the
    same, the failed one is in no mean and gets nothing."""
    group = await slime_group(stack, (1.0, 1), (1.0, 3), (0.0, 1), (None, 1))
    flat = [sample for made in group for sample in made]
    raw, advantages = slime.rewards(slime_args(), flat)

    third = pytest.approx(1 / 3)
    assert raw == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert advantages == [third, third, third, third, pytest.approx(-2 / 3), 0.0]
    assert [sample.remove_sample for sample in flat] == [False] * 5 + [True]


async def test_groups_have_means_of_their_own(stack: Stack) -> None:
    """slime's own fallback takes one mean over the batch as soon as rollouts have several samples."""
    stack.ends |= {0: (1.0, 2), 1: (0.0, 1), 2: (1.0, 1), 3: (1.0, 1)}
    made = []
    for index in range(4):
        sample = slime_sample(index, group_index=index // 2)
        made += await slime.generate(slime_args(), sample, dict(SAMPLING))
    _, advantages = slime.rewards(slime_args(), made)

    assert advantages == [0.5, 0.5, -0.5, 0.0, 0.0]


async def test_the_spread_is_that_of_rollouts(stack: Stack) -> None:
    """With slime's standard deviation, which is the unbiased one."""
    made = await slime_group(stack, (1.0, 2), (0.0, 1))
    args = SimpleNamespace(**vars(slime_args()) | {"grpo_std_normalization": True})
    _, advantages = slime.rewards(args, [sample for one in made for sample in one])

    assert advantages == pytest.approx([0.5 / 2**-0.5, 0.5 / 2**-0.5, -0.5 / 2**-0.5], rel=1e-4)


@pytest.mark.parametrize(
    ("ends", "keep"),
    [
        (((1.0, 3), (0.0, 1)), True),
        (((1.0, 3), (1.0, 1)), False),
        (((1.0, 1), (None, 1)), False),
        ((None, None), False),
    ],
)
async def test_a_group_without_signal_is_filtered(stack: Stack, ends: Any, keep: bool) -> None:
    """A failed rollout is no variance; samples of one rollout are lists."""
    assert slime.has_signal(slime_args(), await slime_group(stack, *ends)) is keep


async def test_an_aborted_step_cancels_its_rollouts(stack: Stack) -> None:
    """slime waits for all pending samples before it trains: they end at once, as its own aborts."""
    from slime.rollout.sglang_rollout import GenerateState

    GenerateState().aborted = True
    (sample,) = await slime.generate(slime_args(), slime_sample(0), dict(SAMPLING))

    assert stack.cancelled == [stack.requests[0].workflow_id]
    assert (sample.status.value, sample.reward, sample.remove_sample) == ("aborted", 0.0, True)


@pytest.mark.parametrize(
    ("versions", "told"),
    [
        ({"weight_version": "4"}, (4, 4)),
        ({"weight_versions": [{"version": "3"}, {"version": "4"}], "weight_version": "4"}, (3, 4)),
        ({"weight_version": "default"}, (None, None)),
        ({}, (None, None)),
    ],
)
async def test_slimes_router_samples(
    stack: Stack,
    monkeypatch: pytest.MonkeyPatch,
    versions: dict[str, Any],
    told: tuple[int | None, int | None],
) -> None:
    """With slime's own client and SGLang's names; a session's calls have one routing key."""
    from slime.utils import http_utils

    tokens = [[-0.5, 5, None], [-0.25, 6, None]]
    meta: dict[str, Any] = {"finish_reason": {"type": "stop"}, "output_token_logprobs": tokens}
    experts = base64.b64encode(numpy.arange(3 * 4, dtype="<i4").tobytes()).decode()
    meta = {**meta, "completion_tokens": 2, "routed_experts": experts}
    http_utils.answer = {"meta_info": {**meta, **versions}}
    args = slime_args(sglang_router_ip="10.0.0.1", sglang_router_port=3000, **REPLAY)
    monkeypatch.setattr(slime, "_awaited", {"a rollout"})
    found = await slime._sample(args, Ask([1, 2], {"max_tokens": 9}, "session", "r"))

    assert found[:5] == ([5, 6], [-0.5, -0.25], FinishReason.STOP, *told)
    assert found.routed_experts is not None
    assert found.routed_experts.shape == (3, 1, 4)
    (url, payload, headers) = http_utils.asked[-1]
    assert (url, headers) == ("http://10.0.0.1:3000/generate", {"X-SMG-Routing-Key": "session"})
    assert (payload["input_ids"], payload["return_logprob"]) == ([1, 2], True)
    assert payload["return_routed_experts"]
    assert payload["sampling_params"]["max_new_tokens"] == 9


async def test_no_call_reaches_slimes_engines_between_steps(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slime may have given their GPUs to the training: a late call waits for the next step."""
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils import http_utils

    meta = {"finish_reason": {"type": "abort"}, "completion_tokens": 0}
    http_utils.answer = {"meta_info": meta}
    args = slime_args(sglang_router_ip="10.0.0.1", sglang_router_port=3000)
    steps: list[tuple[set[str], bool]] = [
        ({"an aborted rollout"}, True),
        (set(), False),
        ({"a rollout"}, False),
    ]
    seen: list[list[Any]] = []

    async def next_step(_: float = 0) -> None:
        seen.append(list(http_utils.asked))
        running, GenerateState().aborted = steps[len(seen) - 1]
        monkeypatch.setattr(slime, "_awaited", running)

    await next_step()
    monkeypatch.setattr(asyncio, "sleep", next_step)
    found = await slime._sample(args, Ask([1], {}, "session", "r"))

    assert (found, seen) == (Sampled([], [], FinishReason.ABORT), [[], [], []])


def kept_args() -> Any:
    return SimpleNamespace(**vars(slime_args()) | {"rollout_top_p": 0.9})


async def test_slime_gets_the_top_p_set_of_each_token(stack: Stack) -> None:
    """As its loss reads them: flat ids, and one more offset than there are response tokens. A segment
    without sets is left out, and a masked sample has an empty set."""
    stack.kept = 1
    stack.ends |= {0: (1.0, 2), 1: (None, 1)}
    (sample,) = await slime.generate(kept_args(), slime_sample(0), dict(SAMPLING))
    (masked,) = await slime.generate(kept_args(), slime_sample(1), dict(SAMPLING))

    assert sample.tokens == [10, 1, 2]
    assert list(sample.rollout_top_p_token_ids) == [1, 7, 2]
    assert list(sample.rollout_top_p_token_offsets) == [0, 2, 3]
    assert (masked.status.value, masked.rollout_top_p_token_ids) == ("aborted", [])
    assert masked.rollout_top_p_token_offsets == [0, 0]


async def test_a_top_p_without_kept_sets_is_refused(stack: Stack) -> None:
    """slime would normalise over the whole vocabulary what was sampled from a part of it."""
    stack.ends[0] = (1.0, 1)
    with pytest.raises(ConfigurationError, match=r"--rollout-top-p must be 1\.0: .*returned none"):
        await slime.generate(kept_args(), slime_sample(0), dict(SAMPLING))


async def test_an_evaluation_needs_no_kept_sets(stack: Stack) -> None:
    """slime does not train on it."""
    stack.ends[0] = (1.0, 1)
    (sample,) = await slime.generate(kept_args(), slime_sample(0), dict(SAMPLING), evaluation=True)

    assert sample.reward == 1.0


async def test_slimes_patched_sglang_returns_the_sets(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for as slime's own rollout asks; two int32 arrays in base64, as its patch sends them."""
    from slime.utils import http_utils

    def int32(*values: int) -> str:
        return base64.b64encode(numpy.array(values, "<i4").tobytes()).decode()

    http_utils.answer = {
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]],
            "completion_tokens": 2,
            "weight_version": "4",
            "top_p_token_ids": int32(5, 9, 6),
            "top_p_token_offsets": int32(0, 2, 3),
        }
    }
    monkeypatch.setattr(slime, "_awaited", {"a rollout"})
    args = SimpleNamespace(**vars(kept_args()), sglang_router_ip="127.0.0.1", sglang_router_port=1)
    found = await slime._sample(args, Ask([1, 2], {"top_p": 0.9}, "s", "r"))

    (_, payload, _) = http_utils.asked[-1]
    assert payload["sampling_params"]["custom_params"] == {"return_top_p_token_ids": True}
    assert found.kept == [[5, 9], [6]]


REPLAY = {"use_rollout_routing_replay": True, "num_layers": 2, "moe_router_topk": 2}


async def test_slime_replays_experts(stack: Stack) -> None:
    """As its own samples hold them: int32, one row less than tokens. A segment whose engine returned none
    is left out, because slime refuses a step with it; without the flag, nothing is read."""
    stack.routed = 1
    stack.ends |= {0: (1.0, 2), 1: (1.0, 2)}
    (kept,) = await slime.generate(slime_args(**REPLAY), slime_sample(0), dict(SAMPLING))
    plain = await slime.generate(slime_args(), slime_sample(1), dict(SAMPLING))

    experts = kept.rollout_routed_experts
    assert (experts.dtype, experts.tolist()) == (numpy.int32, [[[5, 7], [6, 7]]] * 2)
    assert (kept.tokens, kept.reward) == ([10, 1, 2], 1.0)
    assert [one.rollout_routed_experts for one in plain] == [None, None]


async def test_slimes_masked_samples_pass_its_check_of_experts(stack: Stack) -> None:
    """An aborted rollout, and a graded one without any experts, which still counts in its group: slime
    wants a row with an expert other than 0 in each layer of every sample."""
    stack.ends |= {0: None, 1: (1.0, 1)}
    made = [
        (await slime.generate(slime_args(**REPLAY), slime_sample(n), dict(SAMPLING)))[0]
        for n in (0, 1)
    ]

    assert [one.rollout_routed_experts.tolist() for one in made] == [[[[0, 1], [0, 1]]]] * 2
    assert [one.remove_sample for one in made] == [True, True]
    assert [one.metadata["rollout_reward"] for one in made] == [None, 1.0]


async def test_a_trainer_that_leaves_takes_its_rollout_along(stack: Stack) -> None:
    """A cancelled hook cancels the rollout: nothing runs on unread."""
    call = asyncio.ensure_future(slime.generate(slime_args(), slime_sample(0), dict(SAMPLING)))
    while not stack.requests:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    assert stack.cancelled == [stack.requests[0].workflow_id]


# --- verl ------------------------------------------------------------------------------------


def verl_loop(manager: Any = None, **options: Any) -> Any:
    """`name`, `max_model_len`, `replays`: of verl's rollout configuration; `mode`: its trainer's; others
    are the loop's."""
    from perdure.integrations.verl_agent_loop import PerdureAgentLoop

    rollout = SimpleNamespace(
        name=options.get("name", "vllm"),
        max_model_len=options.pop("max_model_len", None),
        enable_rollout_routing_replay=options.pop("replays", False),
    )
    actor = SimpleNamespace(rollout=rollout, model=SimpleNamespace(path="/models/qwen"))
    v1 = SimpleNamespace(trainer_mode=options.pop("mode", "sync"))
    config = SimpleNamespace(actor_rollout_ref=actor, trainer=SimpleNamespace(v1=v1))
    config = SimpleNamespace(config=config)
    options = {"trainer_config": config, "server_manager": manager, "run_id": "try", **options}
    return PerdureAgentLoop(**options)


async def test_verl_instantiates_the_agent_loop(stack: Stack) -> None:
    """Its own arguments reach its base, all others are the rollout's; its registry keeps the file's entry."""
    from verl.experimental.agent_loop.agent_loop import registered

    assert registered == {}
    stack.ends[1] = (1.0, 2)
    loop = verl_loop(tools=[], name="perdure", agent="nop", engine="perdure")
    row = {"extra_info": {"instance": "d/i"}, "uid": "abc", "session_id": 1, "global_steps": 4}
    outputs = await loop.run({"temperature": 0.8, "logprobs": True}, **row)

    (request,) = stack.requests
    assert (request.run_id, request.agent) == ("try-4-abc", "nop")
    assert [(type(o).__name__, o.reward_score) for o in outputs] == [("AgentLoopOutput", 1.0)] * 2
    # Its trainer makes integers of them: None would end the step.
    assert {o.extra_fields["min_global_steps"] for o in outputs} == {4}


async def test_verl_leaves_a_failed_rollout_out(stack: Stack) -> None:
    """No output: verl's trainer takes the group's mean without it."""
    stack.ends[0] = (None, 1)

    assert await verl_loop(engine="perdure").run({}, instance="d/i") == []


EXPERTS: Any = object()
"""An array that a trainer's client returns."""


class ServerManager:
    """verl's, as far as the agent loop sees it. `output`: the fields of its next `TokenOutput`."""

    def __init__(self, **output: Any) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        told: dict[str, Any] = {
            "token_ids": [5, 6],
            "log_probs": [-0.5, -0.25],
            "stop_reason": "completed",
        }
        told |= {"routed_experts": None, "num_preempted": None}
        self.output = SimpleNamespace(**{"extra_fields": {}, **told, **output})

    async def generate(self, request_id: str, **asked: Any) -> Any:
        self.asked.append((request_id, asked))
        return self.output


@pytest.mark.parametrize(
    ("output", "sampling", "sampled"),
    [
        (
            {"extra_fields": {"global_steps": 4}, "routed_experts": EXPERTS, "num_preempted": 2},
            {"max_tokens": 9, "stop_token_ids": [6]},
            Sampled([5, 6], [-0.5, -0.25], FinishReason.STOP, 4, 4, EXPERTS, preemptions=2),
        ),
        (
            {"extra_fields": {"global_steps": 5, "min_global_steps": 3, "max_global_steps": 5}},
            {"max_tokens": 2},
            Sampled([5, 6], [-0.5, -0.25], FinishReason.LENGTH, 3, 5),
        ),
        ({}, {"max_tokens": 9}, Sampled([5, 6], [-0.5, -0.25], FinishReason.LENGTH)),
        (
            {"token_ids": [], "log_probs": None, "stop_reason": "aborted"},
            {"max_tokens": 9},
            Sampled([], (), FinishReason.ABORT),
        ),
    ],
    ids=["stop", "two versions", "full context", "abort"],
)
async def test_verls_server_manager_samples(
    stack: Stack, output: dict[str, Any], sampling: dict[str, Any], sampled: Sampled
) -> None:
    """By session, so that its calls stay on one server. verl says `completed` for a stop and for a limit."""
    manager = ServerManager(**output)
    loop = verl_loop(manager, max_model_len=5)
    found = await loop._sample(Ask([1, 2, 3], sampling, "session", "session-0"))

    assert found == sampled
    wanted = {"prompt_ids": [1, 2, 3], "sampling_params": {**sampling, "logprobs": True}}
    assert manager.asked == [("session", wanted)]


async def test_verls_sglang_has_its_own_names(stack: Stack) -> None:
    """verl passes sampling parameters on to its server as they are."""
    manager = ServerManager()
    await verl_loop(manager, name="sglang")._sample(
        Ask([1], {"seed": 3, "max_tokens": 2}, "s", "r")
    )

    params = manager.asked[0][1]["sampling_params"]
    assert (params["sampling_seed"], params["max_new_tokens"], params["logprobs"]) == (3, 2, True)


async def test_verl_replays_experts(stack: Stack) -> None:
    """With its own flag; a segment whose engine returned none is left out."""
    stack.routed = 1
    stack.ends[0] = (1.0, 2)
    (output,) = await verl_loop(engine="perdure", replays=True).run({}, instance="d/i")

    assert output.prompt_ids == [10]
    assert output.routed_experts.tolist() == [[[5, 7], [6, 7]]] * 2


# --- TorchTitan ------------------------------------------------------------------------------


@dataclasses.dataclass
class TitanSampling:
    temperature: float = 0.8
    max_tokens: int = 512


@pytest.mark.parametrize(("flags", "budget"), [({}, 900.0), ({"agent_budget_s": 60.0}, 60.0)])
def test_torchtitan_leaves_the_budget_to_the_variables(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], budget: float
) -> None:
    """A flag of its launcher wins. What has no flag follows the variables too."""
    from perdure.integrations.torchtitan.rollouter import PerdureRollouter, RolloutFields

    monkeypatch.setenv("SWE_TIME_BUDGET_SEC", "900")
    monkeypatch.setenv("SWE_EVAL_TIMEOUT_SEC", "300")
    fields = RolloutFields(**flags)
    rollouter = PerdureRollouter(PerdureRollouter.Config(run_id="try", rollout=fields))
    (request,) = rollouter._requests("d/i", 0, 1, TitanSampling())
    started = rollout_with_defaults(request)

    assert (started.agent_budget_s, started.grade_timeout_s) == (budget, 300.0)
    assert started.max_attempts == RolloutRequest.model_fields["max_attempts"].default


# --- SkyRL -----------------------------------------------------------------------------------


def skyrl_batch(*repetitions: int) -> dict[str, Any]:
    from skyrl.train.generators.base import TrajectoryID

    return {
        "prompts": [[]] * len(repetitions),
        "env_extras": [{"instance": "d/i"}] * len(repetitions),
        "trajectory_ids": [TrajectoryID("uid-1", n) for n in repetitions],
        "sampling_params": {"temperature": 0.8, "max_generate_length": 99},
        "batch_metadata": SimpleNamespace(training_phase="train", global_step=5),
    }


async def test_skyrl_gets_its_batch_in_order(stack: Stack) -> None:
    """Rows of a rollout together, in the order of the prompts, under SkyRL's own trajectory ids; one that
    failed has no row."""
    stack.ends |= {2: (1.0, 2), 0: (None, 1), 1: (0.0, 1)}
    made = skyrl.generator(
        SimpleNamespace(step_wise_trajectories=True), run_id="try", engine="perdure"
    )
    output = await made.generate(skyrl_batch(2, 0, 1))

    assert [(t.instance_id, t.repetition_id) for t in output["trajectory_ids"]] == [
        *[("uid-1", 2)] * 2,
        ("uid-1", 1),
    ]
    assert output["is_last_step"] == [False, True, True]
    assert output["rewards"] == [[0.0, 0.0], [0.0, 1.0], [0.0, 0.0]]
    assert {request.run_id for request in stack.requests} == {"try-train-5"}
    assert stack.requests[0].sampling.max_tokens_per_turn == 99


class SkyrlClient:
    """SkyRL's `inference_engine_client`. It gets new weights within its next call."""

    model_name = "/models/qwen"

    def __init__(self) -> None:
        self.weight_version = 3
        self.asked: list[tuple[Any, Any]] = []
        self.finished: list[str] = []
        self.support: Any = None

    async def generate(self, batch: Any, model: str | None = None) -> dict[str, Any]:
        self.asked.append((batch, model))
        self.weight_version += 1
        found: Any = {"response_ids": [[5, 6]], "response_logprobs": [[-0.5, -0.25]]}
        found |= {"rollout_sample_support": self.support, "stop_reasons": ["abort"]}
        return {**found, "rollout_expert_indices": [EXPERTS]}

    async def finish_session(self, session_id: str) -> None:
        self.finished.append(session_id)


async def test_skyrls_client_samples() -> None:
    """By session, for the adapter that SkyRL trains; both versions of a call are told."""
    client = SkyrlClient()
    found = await skyrl._sampler(client, "adapter")(Ask([1, 2], {"top_p": 0.9}, "session", "r"))

    assert found == Sampled([5, 6], [-0.5, -0.25], FinishReason.ABORT, 3, 4, EXPERTS)
    params = {"top_p": 0.9, "logprobs": 1}
    batch = {"prompt_token_ids": [[1, 2]], "sampling_params": params, "session_ids": ["session"]}
    assert client.asked == [(batch, "adapter")]


async def test_skyrls_router_learns_that_a_session_has_ended(stack: Stack) -> None:
    """The name is that of the attempt's gateway session, by which its calls were routed. A lost attempt
    had one, too."""
    stack.ends[0], stack.attempts = (1.0, 1), 2
    client = SkyrlClient()
    fields = {"run_id": "try", "engine_host": "127.0.0.1"}
    made = skyrl.generator(SimpleNamespace(step_wise_trajectories=True), client, **fields)
    await made.generate(skyrl_batch(0))

    (request,) = stack.requests
    sessions = [identity_of(request.run_id, request.workflow_id, "agent", k) for k in (1, 2)]
    assert client.finished == sessions


def test_skyrls_engines_must_be_named(stack: Stack) -> None:
    """Without its client, only Perdure's engines could sample, and the trainer says so itself."""
    with pytest.raises(ConfigurationError, match=r'inference_engine_client.*engine="perdure"'):
        skyrl.generator(SimpleNamespace(step_wise_trajectories=True), run_id="try")


async def test_skyrls_group_without_a_verdict_is_masked(stack: Stack) -> None:
    """Its fully asynchronous trainer asks for one group at a time and ends its process at an error."""
    stack.ends |= {0: None, 1: (None, 1)}
    made = skyrl.generator(
        SimpleNamespace(step_wise_trajectories=True), run_id="try", engine="perdure"
    )
    output = await made.generate(skyrl_batch(0, 1))

    assert (output["loss_masks"], output["is_last_step"]) == ([[0], [0]], [True, True])
    assert [one.repetition_id for one in output["trajectory_ids"]] == [0, 1]
    assert output["rollout_metrics"]["perdure/left_out"] == 2


async def test_skyrl_is_told_when_nothing_of_a_batch_is_left(stack: Stack) -> None:
    """As its own coding agent does: a step without a trained token would fail later, and say less."""
    stack.ends[0] = None
    made = skyrl.generator(
        SimpleNamespace(step_wise_trajectories=True), run_id="try", engine="perdure"
    )
    batch = skyrl_batch(0, 0)
    batch["env_extras"][1] = {"instance": "d/k"}
    batch["trajectory_ids"][1].instance_id = "uid-2"

    with pytest.raises(NoResult, match="none of 2 rollouts"):
        await made.generate(batch)


async def test_skyrl_may_train_one_row_for_each_prompt(stack: Stack) -> None:
    """Without step-wise trajectories: the last segment, and for a rollout without a verdict a masked token
    that leaves its siblings' mean as it is."""
    stack.ends |= {0: (1.0, 3), 1: None, 2: (0.0, 1)}
    made = skyrl.generator(
        SimpleNamespace(step_wise_trajectories=False), run_id="try", engine="perdure"
    )
    output = await made.generate(skyrl_batch(0, 1, 2))

    assert output["prompt_token_ids"] == [[12], [0], [10]]
    assert output["rewards"] == [[0.0, 1.0], [0.5], [0.0, 0.0]]
    assert output["loss_masks"] == [[1, 1], [0], [1, 1]]
    assert output["rollout_metrics"]["perdure/untrained_segments"] == 2


async def test_skyrl_replays_experts(stack: Stack) -> None:
    """Each row has them, because SkyRL would replay zeros for one without; a masked row borrows those of a
    real token. 0.3.0 reads lists."""
    stack.routed = 1
    stack.ends |= {0: (1.0, 2), 1: None}
    engines = SimpleNamespace(enable_return_routed_experts=True)
    config = SimpleNamespace(step_wise_trajectories=False, inference_engine=engines)
    output = await skyrl.generator(config, run_id="try", engine="perdure").generate(
        skyrl_batch(0, 1)
    )

    assert output["prompt_token_ids"] == [[10], [0]]
    assert output["rollout_expert_indices"] == [[[[5, 7], [6, 7]]] * 2, [[[5, 7], [6, 7]]]]


async def test_skyrl_replays_kept_sets(stack: Stack) -> None:
    """With its own flag: as wide as its top-k, padded; a masked row has only padding, and a segment
    without sets is left out."""
    stack.kept = 1
    stack.ends |= {0: (1.0, 2), 1: None}
    engines = SimpleNamespace(enable_return_sample_support_set=True)
    config = SimpleNamespace(step_wise_trajectories=False, inference_engine=engines)
    batch = skyrl_batch(0, 1)
    batch["sampling_params"]["top_k"] = 3
    output = await skyrl.generator(config, run_id="try", engine="perdure").generate(batch)

    assert output["prompt_token_ids"] == [[10], [0]]
    assert [rows.tolist() for rows in output["rollout_sample_support"]] == [
        [[1, 7, -1], [2, -1, -1]],
        [[-1, -1, -1]],
    ]


async def test_skyrls_client_returns_kept_sets() -> None:
    """Asked for only with a top-k, without which SkyRL's servers refuse the request."""
    client = SkyrlClient()
    client.support = [numpy.array([[5, 9], [6, -1]], numpy.int32)]
    sample = skyrl._sampler(client, None, keeps=True)
    found = [await sample(Ask([1], params, "s", "r")) for params in ({"top_k": 2}, {})]

    assert found[0].kept == [[5, 9], [6]]
    assert [batch["return_sample_support"] for batch, _ in client.asked] == [True, False]


# --- the trainers' engines -------------------------------------------------------------------


async def slime_calls(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    from slime.utils import http_utils

    meta = {"finish_reason": {"type": "abort"}, "completion_tokens": 0}
    http_utils.answer = {"meta_info": meta}
    args = slime_args(sglang_router_ip="10.0.0.1", sglang_router_port=3000)
    args.perdure = {**args.perdure, **TRAINERS}
    await slime.generate(args, slime_sample(0), dict(SAMPLING))
    assert slime._awaited == set()  # a late call would wait for the next step
    monkeypatch.setattr(slime, "_awaited", {"another rollout"})
    asked: list[Any] = http_utils.asked
    return asked


async def verl_calls(stack: Stack, _: pytest.MonkeyPatch) -> list[Any]:
    manager = ServerManager()
    await verl_loop(manager, **TRAINERS).run({}, instance="d/i")
    return manager.asked


async def skyrl_calls(stack: Stack, _: pytest.MonkeyPatch) -> list[Any]:
    client, config = SkyrlClient(), SimpleNamespace(step_wise_trajectories=True)
    await skyrl.generator(config, client, run_id="try", **TRAINERS).generate(skyrl_batch(0))
    return client.asked


TRAINERS = {"engine": "trainer", "engine_host": "127.0.0.1"}


@pytest.mark.parametrize("calls", [slime_calls, verl_calls, skyrl_calls])
async def test_a_gateways_call_reaches_the_trainers_engines(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, calls: Any
) -> None:
    """A rollout of a hook registers them, for the runs of its training."""
    stack.ends[0] = (1.0, 1)
    asked = await calls(stack, monkeypatch)
    before = len(asked)
    (engine,) = (await trainer_engine._roster().read()).engines
    async with httpx.AsyncClient(trust_env=False) as gateway:
        url, body = f"{engine.url}/inference/v1/generate", {"token_ids": [1, 2]}
        await gateway.post(url, json=body)

    assert (engine.run, len(asked) - before) == ("try-*", 1)


# --- TRL -------------------------------------------------------------------------------------


class Published:
    """Stands for the engines' weights: what was published, as (version, the checkpoint's name)."""

    def __init__(self) -> None:
        self.done: list[tuple[int, str]] = []

    def published(self) -> Any:
        return SimpleNamespace(version=7)

    def publish(self, version: int, source: Path, canaries: Any) -> None:
        assert (source / "model").read_text() == canaries
        self.done.append((version, source.name))


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Published:
    found = Published()
    monkeypatch.setattr(trl_weights, "Weights", lambda: found)
    monkeypatch.setattr(trl_weights, "canaries", lambda trainer: trainer.model.weights)
    return found


def trl_trainer(training: bool = True, output: Path | None = None) -> Any:
    def save(folder: str, *, _internal_call: bool) -> None:
        assert _internal_call  # else it uploads where `push_to_hub` is set
        Path(folder).mkdir(parents=True)
        Path(folder, "model").write_text(trainer.model.weights)

    trainer = SimpleNamespace(
        args=SimpleNamespace(
            temperature=0.8, top_p=1.0, top_k=0, max_completion_length=512, output_dir=output
        ),
        model=SimpleNamespace(training=training, weights="first"),
        state=SimpleNamespace(global_step=6),
        accelerator=SimpleNamespace(
            process_index=1, is_main_process=True, wait_for_everyone=lambda: None
        ),
        use_vllm=False,
        save_model=save,
    )
    return trainer


def test_trl_gets_a_row_for_each_prompt(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens and mask of the last segment, and the reward beside them: None where there is no verdict. What
    is not trained is logged."""
    stack.ends |= {0: (1.0, 3), 1: (None, 1), 2: None}
    rollouts = trl.Rollouts(run_id="try", agent="nop", engine="perdure", publish=False)
    output = rollouts(["d/i"] * 3, trl_trainer())

    assert output["prompt_ids"] == [[12], [0], [0]]
    assert output["completion_ids"] == [[1, 2], [0], [0]]
    assert output["env_mask"] == [[1, 1], [0], [0]]
    assert output["perdure_segments"] == [3, 0, 0]
    logged: dict[str, float] = {}
    extra = {name: output[name] for name in ("perdure_reward", "perdure_segments")}
    said = trl.reward(["text"] * 3, log_metric=logged.__setitem__, trainer_state=None, **extra)
    assert said == [1.0, None, None]
    assert logged == {"perdure/untrained_segments": 2 / 3, "perdure/left_out": 2 / 3}
    assert "2 segments of rollout/try-1-6-1/i/0 are not trained" in caplog.text


def test_trl_calls_have_ids_of_their_own(stack: Stack) -> None:
    """Two generations of one step, and of training and evaluation, are different rollouts; the siblings
    of a prompt count up."""
    stack.ends |= {0: (1.0, 1), 1: (1.0, 1)}
    rollouts = trl.Rollouts(run_id="try", engine="perdure", publish=False)
    for training in (True, True, False):
        rollouts(["d/i", "d/k", "d/i"], trl_trainer(training))

    assert [(r.run_id, r.instance, r.sample_index) for r in stack.requests[:3]] == [
        ("try-1-6-1", "d/i", 0),
        ("try-1-6-1", "d/k", 0),
        ("try-1-6-1", "d/i", 1),
    ]
    assert [r.run_id for r in stack.requests[3::3]] == ["try-1-6-2", "try-1-eval-6-1"]
    assert stack.requests[0].sampling.max_tokens_per_turn == 512


def test_trls_weights_sample_its_rollouts(
    stack: Stack, published: Published, tmp_path: Path
) -> None:
    """Each step's model is published under the next version, before rollouts that only it may sample; TRL
    asks for it where its vLLM would be. The last two checkpoints are kept."""
    stack.ends[0] = (1.0, 1)
    trainer = trl_trainer(output=tmp_path)
    rollouts = trl.Rollouts(run_id="try", engine="perdure")
    rollouts(["d/i"], trainer)
    for step in (7, 8):
        trainer.state.global_step, trainer.model.weights = step, f"of step {step}"
        trainer.vllm_generation.sync_weights()
        rollouts(["d/i"], trainer)

    assert published.done == [(8, "8"), (9, "9"), (10, "10")]
    assert [(r.policy_version, r.max_staleness) for r in stack.requests] == [
        (8, 0),
        (9, 0),
        (10, 0),
    ]
    assert (trainer.use_vllm, trainer._last_loaded_step) == (True, 6)
    assert {one.name for one in (tmp_path / "perdure-weights").iterdir()} == {"9", "10"}


@pytest.mark.parametrize(
    ("part", "field", "fix"),
    [("", "use_vllm", "use_vllm"), ("model", "peft_config", "merged model")],
)
def test_what_trl_cannot_publish_is_refused(
    published: Published, part: str, field: str, fix: str
) -> None:
    """Before the first rollout: engines of its own, or adapters, of which Perdure's engines would get none."""
    trainer = trl_trainer()
    setattr(getattr(trainer, part) if part else trainer, field, True)

    with pytest.raises(ConfigurationError, match=fix):
        trl.Rollouts(run_id="try", engine="perdure")(["d/i"], trainer)


TRL_REFUSED = 'Request failed: 400, {"error": {"message": "max_tokens must be at least 1"}}'


class TrlClient:
    """Stands for the client of TRL's server. Its logprobs have another token before the sampled one."""

    base_url = "http://10.0.0.5:8000"

    def __init__(self) -> None:
        self.logprobs_mode = "processed_logprobs"
        self.asked: list[Any] = []

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": self.logprobs_mode, "max_model_len": 6}}

    def generate(self, prompts: Any, generation_kwargs: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((prompts, generation_kwargs))
        if generation_kwargs["max_tokens"] == 0:
            raise Exception(TRL_REFUSED)
        return {
            "completion_ids": [[7, 8]],
            "logprobs": [[[-0.1, -0.5], [-0.25]]],
            "logprob_token_ids": [[[9, 7], [8]]],
        }


@pytest.fixture
def trl_server() -> Any:
    """A trainer with `use_vllm=True` and `vllm_mode="server"`."""
    trainer = trl_trainer()
    trainer.use_vllm, trainer._last_loaded_step = True, 6
    trainer.model.name_or_path = "/models/qwen"
    trainer.vllm_generation = SimpleNamespace(mode="server", vllm_client=TrlClient())
    return trainer


async def trl_sampled(generation: Any, prompt: list[int], **sampling: Any) -> Any:
    return await generation.sample(Ask(prompt, sampling, "session", "s-0"))


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([1], {"max_tokens": 9}, FinishReason.STOP),
        ([1], {"max_tokens": 2}, FinishReason.LENGTH),
        ([1], {"max_tokens": 2, "stop_token_ids": [8]}, FinishReason.STOP),
        ([1, 2, 3, 4], {"max_tokens": 9}, FinishReason.LENGTH),
    ],
)
async def test_trls_server_samples_a_turn(
    trl_server: Any, prompt: list[int], sampling: dict[str, Any], reason: FinishReason
) -> None:
    """With the logprobs of the sampled tokens, and the reason that TRL's client does not tell: an end
    token, `max_tokens`, or the model's context of 6."""
    found = await trl_sampled(trl_generation.generation_of(trl_server), prompt, **sampling)

    assert (found.token_ids, found.logprobs, found.finish_reason) == ([7, 8], [-0.5, -0.25], reason)
    assert trl_server.vllm_generation.vllm_client.asked == [([prompt], sampling)]


async def test_what_trls_server_refuses_is_refused(trl_server: Any) -> None:
    """It is an answer to the agent, not a fault of the engine that the gateway would wait for."""
    with pytest.raises(Refused, match="max_tokens must be at least 1") as refused:
        await trl_sampled(trl_generation.generation_of(trl_server), [1], max_tokens=0)

    assert refused.value.status == 400


def test_trls_server_samples_for_the_rollouts_of_all_processes(
    stack: Stack, trl_server: Any
) -> None:
    """The main process registers it before any process starts a rollout. Its engine answers after the
    main process's own rollouts have ended."""
    stack.ends[0] = (1.0, 1)
    waited: list[int] = []
    trl_server.accelerator.wait_for_everyone = lambda: waited.append(len(stack.requests))
    rollouts = trl.Rollouts(run_id="try", engine_host="127.0.0.1")
    rollouts(["d/i"], trl_server)
    (engine,) = asyncio.run(trainer_engine._roster().read()).engines
    body = {"token_ids": [1], "sampling_params": {"max_tokens": 9}}
    answer = httpx.post(f"{engine.url}/inference/v1/generate", json=body, trust_env=False).json()

    assert (waited, engine.run) == ([0], "try-*")
    assert answer["choices"][0]["token_ids"] == [7, 8]
    assert stack.requests[0].policy_version is None
    trl_server.accelerator.is_main_process = False
    del trl_server.vllm_generation.vllm_client
    trl.Rollouts(run_id="try", engine_host="127.0.0.1")(["d/i"], trl_server)
    assert len(asyncio.run(trainer_engine._roster().read()).engines) == 1


class ColocatedVllm:
    """Stands for vLLM's `LLMEngine`: refuses an empty prompt, and ends the call of the token 1."""

    def __init__(self) -> None:
        self.calls: dict[str, list[int]] = {}

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        if not prompt["prompt_token_ids"]:
            raise LookupError("prompt: the decoder prompt cannot be empty")
        self.calls[name] = prompt["prompt_token_ids"]

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.calls[name]

    def step(self) -> list[Any]:
        done = [name for name, ids in self.calls.items() if ids == [1]]
        logprobs = [{7: SimpleNamespace(logprob=-0.5), 9: SimpleNamespace(logprob=-0.1)}]
        output = SimpleNamespace(token_ids=(7,), logprobs=logprobs, finish_reason="length")
        return [
            SimpleNamespace(request_id=name, finished=True, outputs=[output])
            for name in done
            if self.calls.pop(name)
        ]


@pytest.fixture
def trl_colocated(trl_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer with `use_vllm=True` and `vllm_mode="colocate"`, in process 1."""
    monkeypatch.setattr(trl_generation, "_sampling_params", lambda ask: None)
    trl_server.vllm_generation = SimpleNamespace(
        mode="colocate",
        tensor_parallel_size=1,
        enable_sleep_mode=False,
        llm=SimpleNamespace(llm_engine=ColocatedVllm()),
    )
    return trl_server


async def test_trls_colocated_vllm_has_only_the_calls_of_its_step(trl_colocated: Any) -> None:
    """One that the gateway gives up is aborted, and what runs when the rollouts have ended is dropped,
    because the weights change next. A refusal is an answer, and the other calls go on."""
    engine = trl_colocated.vllm_generation.llm.llm_engine
    generation: Any = trl_generation.generation_of(trl_colocated)
    given_up, left = (asyncio.create_task(trl_sampled(generation, [token])) for token in (2, 3))

    async def rollouts() -> Any:
        await until(lambda: len(engine.calls) == 2, "both run")
        given_up.cancel()
        await until(lambda: len(engine.calls) == 1, "one is aborted")
        with pytest.raises(Refused, match="cannot be empty"):
            await trl_sampled(generation, [])
        return await trl_sampled(generation, [1])

    assert await generation.until(rollouts()) == Sampled([7], [-0.5], FinishReason.LENGTH, 6)
    assert engine.calls == {}
    with pytest.raises(RuntimeError, match="the training step has ended"):
        await left


def test_trls_colocated_vllm_samples_for_its_process(stack: Stack, trl_colocated: Any) -> None:
    """Another process may already train, or wait for this one, and its vLLM with it."""
    stack.ends[0] = (1.0, 1)
    trl.Rollouts(run_id="try", engine_host="127.0.0.1")(["d/i"], trl_colocated)
    (engine,) = asyncio.run(trainer_engine._roster().read()).engines

    assert (engine.run, stack.requests[0].run_id) == ("try-1-*", "try-1-6-1")


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"use_vllm": False}, "set use_vllm=True"),
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"mode": "colocate", "tensor_parallel_size": 2}, 'use vllm_mode="server"'),
    ],
)
def test_what_trl_cannot_sample_is_refused(
    trl_server: Any, changes: dict[str, Any], fix: str
) -> None:
    """Before the first rollout, with what to change."""
    for name, value in changes.items():
        generation = trl_server.vllm_generation
        owners = {"use_vllm": trl_server, "logprobs_mode": generation.vllm_client}
        setattr(owners.get(name, generation), name, value)

    with pytest.raises(ConfigurationError, match=fix):
        trl.Rollouts(run_id="try")(["d/i"], trl_server)


def test_rows_are_json(stack: Stack) -> None:
    """Trainers dump their samples; what is in them can be written."""
    made = asyncio.run(slime_group(stack, (1.0, 1)))

    assert json.dumps(made[0][0].metadata)


# --- the page --------------------------------------------------------------------------------


def test_every_name_of_the_page_can_be_imported(stack: Stack) -> None:
    """What a launcher is told to name is there, with a trainer of that name installed."""
    page = (ROOT / "docs/train.md").read_text()
    names = set(re.findall(r"perdure\.integrations\.\w+\.\w+", page))

    def known(name: str) -> bool:
        module, _, last = name.rpartition(".")
        return hasattr(importlib.import_module(module), last) or find_spec(name) is not None

    assert len(names) >= 4
    assert [name for name in names if not known(name)] == []


async def test_the_pages_skyrl_example_gives_its_generator(stack: Stack) -> None:
    """As printed, with SkyRL's own base of experiments."""
    names: dict[str, Any] = {"BasePPOExp": object}
    exec(docs_pages.block("train.md", "python skyrl"), names)
    config = SimpleNamespace(generator=SimpleNamespace(step_wise_trajectories=True))
    stack.ends[0] = (1.0, 1)
    made = names["Exp"]().get_generator(config, None, SkyrlClient())

    assert len((await made.generate(skyrl_batch(0)))["rewards"]) == 1


def test_the_pages_trl_example_gives_rows(stack: Stack, trl_server: Any) -> None:
    """As printed: the dataset's prompt is an instance, and the reward is the rollout's."""
    made: dict[str, Any] = {}

    def trainer(model: Any, reward: Any, config: Any, rows: Any, rollout_func: Any) -> Any:
        made.update(reward=reward, rows=rows, rollouts=rollout_func)
        return SimpleNamespace(train=lambda: None)

    names = {"Dataset": SimpleNamespace(from_list=list), "GRPOTrainer": trainer}
    exec(docs_pages.block("train.md", "python trl"), names | {"model": None, "config": None})
    stack.ends[0] = (1.0, 1)
    output = made["rollouts"]([made["rows"][0]["prompt"]], trl_server)

    assert made["reward"](["text"], log_metric=lambda *_: None, **output) == [1.0]
