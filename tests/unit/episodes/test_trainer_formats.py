"""Data for trainers: their own field names, the recorded ids, and no invented reward."""

import asyncio
import base64
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pyarrow.parquet as pq
import pytest

from perdure.cli.main import invoke
from perdure.client.episode_reader import read_episodes
from perdure.episodes import trainer_formats, turns_parquet
from perdure.episodes.episode import EpisodeParts, EpisodeSegments
from perdure.episodes.episode_store import read_segments
from perdure.episodes.run_export import ExportReport, Format, Rules, export_run
from perdure.episodes.segment_experts import have_experts, segment_experts
from perdure.episodes.trajectory_segments import SegmentMode, cut
from perdure.errors import Boundary, ConfigurationError
from perdure.storage.local_store import LocalStore
from perdure.types import (
    Failure,
    FinishReason,
    Grade,
    Outcome,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    RoutedExperts,
    SamplingSpan,
    Turn,
    TurnSampling,
    Verification,
    VersionSpan,
)
from perdure.types.routed_experts import are_experts
from tests.stored_episodes import store_episode

LOST = Failure(boundary=Boundary.SANDBOX, type="SandboxLost", message="gone")


def turn(index: int, prompt: tuple[int, ...], completion: tuple[int, ...], **fields: Any) -> Turn:
    version = fields.pop("version", 3)
    span = VersionSpan(version=version, start=0, end=len(completion))
    return Turn(
        index=index,
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=(-0.1,) * len(completion),
        versions=(span,),
        **fields,
    )


TWO_BRANCHES = (
    turn(0, (1, 2), (4,)),
    turn(1, (1, 2, 4, 8), (5, 6), version=4, parent=0),
    turn(2, (90, 91), (7,), version=4, finish_reason=FinishReason.LENGTH),
)


class Run:
    """A run in a store, rollout by rollout."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store

    async def add(
        self,
        reward: float | None,
        taken: tuple[Turn, ...] = TWO_BRANCHES,
        sample_index: int = 0,
        instance: str = "click-1",
        age: Mapping[str, Any] | None = None,
        **graded: Any,
    ) -> EpisodeSegments:
        """`age`: more fields of the request; `graded`: of the grade."""
        known = {"run_id": "r", "instance": f"tests/{instance}", "sample_index": sample_index}
        request = RolloutRequest.model_validate({**known, **(age or {})})
        key = f"runs/r/rollouts/{instance}/{sample_index}/attempts/1/turns.parquet"
        await self.store.put(key, turns_parquet.encode(taken))
        outcome = Outcome.RESOLVED if reward else Outcome.UNRESOLVED
        parts = EpisodeParts(
            request=request,
            status=RolloutStatus.FAILED if reward is None else RolloutStatus.GRADED,
            failure=LOST if reward is None else None,
            grade=None
            if reward is None
            else Grade(outcome=outcome, rewards=Rewards(binary=reward), **graded),
            started_at=0.0,
            finished_at=10.0,
            turns=taken,
            turns_key=key,
        )
        segments = cut(taken)
        episode = await store_episode(self.store, parts, segments)
        return await read_segments(self.store, episode)

    async def export(
        self, format: Format, out: Path, rules: Rules | None = None
    ) -> tuple[ExportReport, list[dict[str, Any]]]:
        report = await export_run(self.store, "r", format, out, rules)
        if out.suffix == ".parquet":
            return report, pq.read_table(out).to_pylist()
        return report, [json.loads(line) for line in out.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(LocalStore(tmp_path / "store"))


async def test_segments_are_read_back_as_they_were_cut(run: Run) -> None:
    """Ids, masks, logprobs, versions, kinds and turns survive the store."""
    assert list((await run.add(1.0)).segments) == cut(TWO_BRANCHES)


SAMPLED = TurnSampling(
    temperature=0.7,
    top_p=0.9,
    top_k=20,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    max_tokens=9,
    seed=5,
)
SPANS = [
    {"start": start, "end": end, "sampling": SAMPLED.model_dump(mode="json")}
    for start, end in ((0, 1), (2, 4))
]


async def sampled(run: Run) -> EpisodeSegments:
    """Two turns of one chain, with their texts and their sampling parameters."""
    told = {"sampling": SAMPLED, "new_messages": '[{"role": "user", "content": "do"}]'}
    said = {**told, "answer": '{"role": "assistant", "content": "a"}'}
    return await run.add(1.0, tuple(one.model_copy(update=said) for one in TWO_BRANCHES[:2]))


@pytest.mark.parametrize(
    ("format", "facts"),
    [
        ("slime", lambda row: row["metadata"]),
        ("skyrl", lambda row: row["env_metrics"][0]),
        ("torchtitan", lambda row: row["metadata"]),
        ("verl", lambda row: row["extra_fields"]),
        ("sft-tokens", lambda row: row["metadata"]),
    ],
)
async def test_the_sampling_of_each_turn_reaches_every_export(
    run: Run, tmp_path: Path, format: Format, facts: Callable[[Any], Any]
) -> None:
    """As spans of the response, with the common temperature, in both forms of the file."""
    await sampled(run)
    _, (line,) = await run.export(format, tmp_path / "out.jsonl")
    _, (row,) = await run.export(format, tmp_path / "out.parquet")
    texts = {name: json.loads(v) for name, v in row.items() if v and str(v).startswith("{")}
    texts["env_metrics"] = [texts.get("env_metrics")]

    for found in (facts(line), facts(texts)):
        assert (found["temperature"], found["sampling"]) == (0.7, SPANS)


TOO_STALE = {"policy_version": 3, "max_staleness": 0, "too_stale": "finish"}


@pytest.mark.parametrize(
    ("format", "trained"),
    [
        ("slime", lambda row: [*row["loss_mask"], not row["remove_sample"]]),
        ("skyrl", lambda row: [any(mask) for mask in row["loss_masks"]]),
        ("verl", lambda row: row["response_mask"]),
        ("episodes", lambda row: [*row["loss_mask"], row["trainable"]]),
    ],
)
async def test_a_rollout_that_is_too_stale_is_masked_in_each_export(
    run: Run, tmp_path: Path, format: Format, trained: Callable[[Any], Any]
) -> None:
    """Its reward stays, for its group's baseline."""
    await run.add(1.0, age=TOO_STALE)
    suffix = "parquet" if format == "episodes" else "jsonl"
    report, rows = await run.export(format, tmp_path / f"out.{suffix}")

    assert report.omitted == ()
    assert [any(trained(row)) for row in rows] == [False] * len(rows)
    assert "1.0" in str(rows[-1])


@pytest.mark.parametrize("format", ["torchtitan", "sft-tokens"])
async def test_formats_without_a_use_for_a_stale_rollout_leave_it_out(
    run: Run, tmp_path: Path, format: Format
) -> None:
    """With the reason. The advantages of the others count it."""
    await run.add(0.0)
    await run.add(1.0, sample_index=1, age=TOO_STALE)
    report, rows = await run.export(format, tmp_path / "out.jsonl")

    assert len(rows) == 2
    assert "too stale: sampled by policy versions 3 to 4" in str(report.omitted)
    if format == "torchtitan":
        assert {min(row["advantage"]) for row in rows} == {-0.5}


async def test_a_stale_rollout_is_masked_however_it_is_cut(run: Run) -> None:
    """Also if its segments are cut anew from its turns."""
    episode = (await run.add(1.0, age=TOO_STALE)).episode
    modes: tuple[SegmentMode, ...] = ("tree", "merge_turns")
    for mode in modes:
        found = await read_segments(run.store, episode, mode=mode)

        assert not any(any(one.loss_mask) for one in found.segments)


async def test_the_sampling_of_each_turn_reaches_trl(run: Run) -> None:
    """A rollout's row has it for the reward functions, to which TRL passes unknown fields."""
    (facts,) = trainer_formats.trl_output([await sampled(run)])["perdure_metadata"]

    assert (facts["temperature"], facts["sampling"]) == (0.7, SPANS)


async def test_the_sampling_of_each_turn_is_stored(run: Run, tmp_path: Path) -> None:
    """With the segments, in the episodes' columns, and at each step of a trajectory."""
    found = await sampled(run)
    _, (columns,) = await run.export("episodes", tmp_path / "out.parquet")
    _, (trajectory,) = await run.export("atif", tmp_path / "out.jsonl")
    steps = [step["extra"] for step in trajectory["steps"] if step["source"] == "agent"]

    assert found.episode.segments[0].temperature == 0.7
    assert found.segments[0].sampling == cut_sampling(columns["sampling"])
    assert [step["sampling"] for step in steps] == [SAMPLED.model_dump(mode="json")] * 2


def cut_sampling(column: list[dict[str, Any]]) -> tuple[SamplingSpan, ...]:
    return tuple(map(SamplingSpan.model_validate, column))


async def test_an_episode_of_an_earlier_version_is_exported(run: Run, tmp_path: Path) -> None:
    """Token arrays that lack a newer column have null in it."""
    key = (await run.add(1.0)).episode.tokens_key
    table = pq.read_table(io.BytesIO((await run.store.get(key)).data)).drop_columns(["sampling"])
    sink = io.BytesIO()
    pq.write_table(table, sink)
    await run.store.put(key, sink.getvalue())
    _, columns = await run.export("episodes", tmp_path / "out.parquet")

    assert [row["sampling"] for row in columns] == [None, None]
    _, lines = await run.export("slime", tmp_path / "out.jsonl")
    assert [line["metadata"]["temperature"] for line in lines] == [None, None]


# --- experts ---------------------------------------------------------------------------------

LATE = numpy.arange(4 * 2 * 2).reshape(4, 2, 2)
ROUTED = (
    turn(0, (1, 2), (4,), routed_experts=RoutedExperts.of(LATE[:2], 0)),
    turn(1, (1, 2, 4, 8), (5,), parent=0, routed_experts=RoutedExperts.of(LATE[2:] + 300, 2)),
    turn(2, (1, 2, 4, 9), (6,), parent=0, routed_experts=RoutedExperts.of(LATE[2:] + 400, 2)),
    turn(3, (1, 2, 4, 9, 6), (7,), parent=2),
)
"""The third turn branches off; the fourth has no experts."""


async def test_experts_follow_the_branch_of_their_segment(run: Run) -> None:
    """A branch shares its parent's rows and has its own after them. A segment has no experts if one
    of its turns has none, and the episode says which."""
    stored = (await run.add(1.0, ROUTED)).episode
    found = await read_segments(run.store, stored, routed_experts=True)
    branched = await run.add(1.0, ROUTED[:3], sample_index=1)
    whole = await read_segments(run.store, branched.episode, routed_experts=True)

    assert [one.routed_experts for one in stored.segments] == [True, False]
    assert found.experts_of(found.segments[1]) is None
    assert [one.turns for one in found.with_experts().segments] == [(0, 1)]
    for segment, added in zip(whole.segments, (300, 400), strict=True):
        experts = whole.experts_of(segment)
        assert experts is not None
        assert experts.tolist() == numpy.concatenate([LATE[:2], LATE[2:] + added]).tolist()


@pytest.mark.parametrize(
    "second",
    [RoutedExperts.of(LATE[3:], 3), RoutedExperts.of(LATE[2:].reshape(2, 4, 1), 2)],
    ids=["a row is missing", "other layers"],
)
def test_experts_that_do_not_join_are_left_out(second: RoutedExperts) -> None:
    """A trainer would replay each token with the experts of another."""
    turns = (ROUTED[0], turn(1, (1, 2, 4, 8), (5,), parent=0, routed_experts=second))
    segments = cut(turns)

    assert (segment_experts(turns, segments), have_experts(turns, segments)) == ([None], [False])


def test_a_segment_that_ends_with_context_has_no_experts() -> None:
    """No turn has read its last tokens, so their rows do not exist."""
    (segment,) = cut(ROUTED[:2])
    longer = segment.model_copy(update={"response_ids": (*segment.response_ids, 11)})

    assert segment_experts(ROUTED, [longer]) == [None]


@pytest.mark.parametrize(
    ("rows", "are"),
    [([[[0, 32767]]], True), ([[[0, 32768]]], False), ([[[0, -1]]], False), ([[0, 1]], False)],
)
def test_numbers_that_trainers_cannot_hold_are_no_experts(rows: Any, are: bool) -> None:
    """They take int16, in which a larger number would be another expert."""
    assert are_experts(numpy.array(rows)) is are


async def test_experts_are_read_only_on_request(run: Run) -> None:
    """They are most of the bytes; the segments' own file has none."""
    found = await run.add(1.0, ROUTED[:3])

    assert found.experts == ()
    assert found == await read_segments(run.store, found.episode, routed_experts=True)


@pytest.mark.parametrize("mode", ["tree", "merge_turns"])
async def test_experts_follow_the_cut(run: Run, mode: SegmentMode) -> None:
    """By any rule: `merge_turns` drops what the branch does not repeat, and its experts."""
    stored = (await run.add(1.0, ROUTED[:3])).episode
    found = await read_segments(run.store, stored, mode=mode, routed_experts=True)

    last = found.experts_of(found.segments[-1])
    assert last is not None
    assert last[-1].tolist() == (LATE[-1] + 400).tolist()


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("slime", "rollout_routed_experts"),
        ("skyrl", "rollout_expert_indices"),
        ("verl", "routed_experts"),
    ],
)
async def test_experts_are_exported_as_bytes(
    run: Run, tmp_path: Path, format: Format, name: str
) -> None:
    """With type and shape, in both forms of the file, and null where an engine returned none."""
    await run.add(1.0, ROUTED[:2])
    _, (line,) = await run.export(format, tmp_path / "out.jsonl")
    _, (row,) = await run.export(format, tmp_path / "out.parquet")
    told = line[name][0] if format == "skyrl" else line[name]
    expected = numpy.concatenate([LATE[:2], LATE[2:] + 300]).astype(numpy.int16)

    assert (told["dtype"], told["shape"]) == ("int16", [4, 2, 2])
    assert base64.b64decode(told["data"]) == row[name]["data"] == expected.tobytes()
    await run.add(1.0, ROUTED, sample_index=1)
    _, lines = await run.export(format, tmp_path / "out.jsonl")
    assert lines[-1][name] is None


# --- slime -----------------------------------------------------------------------------------


async def test_slime_gets_one_sample_a_segment(run: Run) -> None:
    """`tokens` has prompt and response; other arrays follow the response; one id, whole reward."""
    first, second = trainer_formats.slime_samples(await run.add(1.0), index=5, group_index=2)

    assert (first["tokens"], first["response_length"]) == ([1, 2, 4, 8, 5, 6], 4)
    assert first["loss_mask"] == [1, 0, 1, 1]
    assert first["rollout_log_probs"] == [-0.1, 0.0, -0.1, -0.1]
    assert (first["reward"], second["reward"]) == (1.0, 1.0)
    assert {(s["index"], s["rollout_id"], s["group_index"]) for s in (first, second)} == {(5, 5, 2)}
    assert (first["status"], second["status"]) == ("completed", "truncated")
    assert first["weight_versions"] == ["3", "4"]


async def test_slime_metadata_has_the_documented_names(run: Run) -> None:
    """segment_kind, finish_reason, segment_idx and num_segments, as in slime's example."""
    _, second = trainer_formats.slime_samples(await run.add(1.0), index=0, group_index=0)
    names = ("segment_kind", "finish_reason", "segment_idx", "num_segments")

    assert [second["metadata"][name] for name in names] == ["final", "length", 1, 2]


async def test_a_rollout_without_a_segment_becomes_slimes_placeholder(run: Run) -> None:
    """One masked token, aborted, with the grade's reward, so the group keeps its size."""
    (sample,) = trainer_formats.slime_samples(await run.add(0.0, ()), index=0, group_index=0)

    assert (sample["tokens"], sample["response_length"], sample["loss_mask"]) == ([0, 0], 1, [0])
    assert (sample["reward"], sample["status"], sample["remove_sample"]) == (0.0, "aborted", True)


async def test_a_failed_rollout_is_no_zero_for_slime(run: Run) -> None:
    """slime's own aborted sample has a number as reward; its metadata has no verdict."""
    (sample,) = trainer_formats.slime_samples(await run.add(None), index=0, group_index=0)

    assert (sample["reward"], sample["remove_sample"], sample["loss_mask"]) == (0.0, True, [0])
    assert (sample["metadata"]["rollout_reward"], sample["metadata"]["failure"]) == (None, "gone")


# --- SkyRL -----------------------------------------------------------------------------------


async def test_skyrl_rows_of_a_rollout_are_its_steps(run: Run) -> None:
    """A rollout's rows are adjacent; the last one has the whole reward."""
    output = trainer_formats.skyrl_output([await run.add(1.0), await run.add(0.0, sample_index=1)])

    assert output["is_last_step"] == [False, True, False, True]
    assert output["rewards"] == [[0.0] * 4, [1.0], [0.0] * 4, [0.0]]
    assert output["response_ids"][:2] == [[4, 8, 5, 6], [7]]
    assert output["loss_masks"][0] == [1, 0, 1, 1]
    assert [one["repetition_id"] for one in output["trajectory_ids"]] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("pairs", "responses", "masks", "rewards"),
    [
        pytest.param(
            [((10,), (20,)), ((10, 20, 30), (40, 41))],
            [[20, 30, 40, 41]],
            [[1, 0, 1, 1]],
            [[0.0, 0.0, 0.0, 1.0]],
            id="an extension is merged",
        ),
        pytest.param(
            [((1,), (2,)), ((1, 2, 3), (4,)), ((1, 23, 4, 5), (6,)), ((1, 23, 4, 5, 6, 7), (8,))],
            [[2, 3, 4], [6, 7, 8]],
            [[1, 0, 1], [1, 0, 1]],
            [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]],
            id="another history is another row",
        ),
        pytest.param(
            [((10,), (20, 30)), ((10, 20), (30, 40))],
            [[20, 30], [30, 40]],
            [[1, 1], [1, 1]],
            [[0.0, 0.0], [0.0, 1.0]],
            id="half a completion is no extension",
        ),
    ],
)
async def test_skyrl_published_cases(
    run: Run,
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]],
    responses: list[list[int]],
    masks: list[list[int]],
    rewards: list[list[float]],
) -> None:
    """SkyRL's own merging of steps gives our segments' sequences."""
    taken = tuple(turn(n, prompt, completion) for n, (prompt, completion) in enumerate(pairs))
    output = trainer_formats.skyrl_output([await run.add(1.0, taken)])

    assert output["response_ids"] == responses
    assert output["loss_masks"] == masks
    assert output["rewards"] == rewards


async def test_skyrl_counts_what_it_leaves_out(run: Run) -> None:
    """A row needs a reward, so a failed rollout has none; the metrics count it."""
    output = trainer_formats.skyrl_output([await run.add(None), await run.add(1.0, sample_index=1)])

    assert len(output["response_ids"]) == 2
    assert output["rollout_metrics"]["perdure/left_out"] == 1


async def test_skyrl_has_every_list_along_the_rows(run: Run) -> None:
    """SkyRL zips its lists, so each has one entry per row, also the times."""
    output = trainer_formats.skyrl_output([await run.add(1.0), await run.add(0.0, sample_index=1)])
    lists = {name: value for name, value in output.items() if isinstance(value, list)}
    lists |= output["trajectory_time_splits"]

    assert {len(value) for value in lists.values()} == {4}
    assert output["trajectory_generation_times"] == [10.0] * 4


# --- TorchTitan ------------------------------------------------------------------------------


async def packed(run: Run, *taken: Turn) -> list[dict[str, Any]]:
    return trainer_formats.torchtitan_samples(await run.add(1.0, taken), group_id=3, advantage=0.5)


async def test_torchtitan_one_turn(run: Run) -> None:
    """The prompt is masked out, the completion in; only the completion has the advantage."""
    (sample,) = await packed(run, turn(0, (1, 2), (4, 5)))

    assert sample["token_ids"] == [1, 2, 4, 5]
    assert sample["loss_mask"] == [False, False, True, True]
    assert sample["advantage"] == [0.0, 0.0, 0.5, 0.5]


async def test_torchtitan_versions_span_the_branch(run: Run) -> None:
    """The oldest and the newest version of the turns that a branch trains."""
    (sample,) = await packed(
        run, turn(0, (1, 2), (4, 5)), turn(1, (1, 2, 4, 5, 9), (7,), version=4)
    )

    assert sample["token_ids"] == [1, 2, 4, 5, 9, 7]
    assert (sample["min_policy_version"], sample["max_policy_version"]) == (3, 4)


async def test_torchtitan_three_turns_are_one_branch(run: Run) -> None:
    """Environment replies are masked out, with logprob 0."""
    (sample,) = await packed(
        run,
        turn(0, (1, 2), (4,)),
        turn(1, (1, 2, 4, 8), (5, 6)),
        turn(2, (1, 2, 4, 8, 5, 6, 9), (7,)),
    )

    assert "".join("FT"[one] for one in sample["loss_mask"]) == "FFTFTTFT"
    assert sample["logprobs"] == [0.0, 0.0, -0.1, 0.0, -0.1, -0.1, 0.0, -0.1]


async def test_torchtitan_an_edited_history_opens_a_branch(run: Run) -> None:
    """Each branch has its first turn and the whole advantage."""
    first, second = await packed(run, turn(0, (1, 2), (4,)), turn(1, (90, 91), (5,)))

    assert (first["token_ids"], second["token_ids"]) == ([1, 2, 4], [90, 91, 5])
    assert [s["rollout_id"]["turn_id"] for s in (first, second)] == [0, 1]
    assert (first["advantage"][-1], second["advantage"][-1]) == (0.5, 0.5)


async def test_torchtitan_nothing_sampled_is_no_sample(run: Run) -> None:
    """A first turn without sampled tokens gives no training data."""
    assert await packed(run, turn(0, (1, 2), ())) == []


async def test_advantages_count_a_rollout_once(run: Run) -> None:
    """The group's mean counts each rollout once, however many segments, and no failures."""
    found = [
        await run.add(1.0),
        await run.add(1.0, TWO_BRANCHES[:1], 1),
        await run.add(0.0, TWO_BRANCHES[:1], 2),
        await run.add(0.0, TWO_BRANCHES[:1], 3),
        await run.add(None, TWO_BRANCHES, 4),
    ]

    advantages = trainer_formats.group_advantages(one.episode for one in found)
    assert list(advantages.values()) == [0.5, 0.5, -0.5, -0.5]


# --- verl ------------------------------------------------------------------------------------


async def test_verl_gets_one_output_a_segment(run: Run) -> None:
    """Prompt and response are separate, and the mask covers sampled tokens. Each output has the
    whole reward, whatever its share, because verl uses the last output's for all."""
    first, _ = trainer_formats.verl_outputs((await run.add(1.0)).shared("split"))

    assert (first["prompt_ids"], first["response_ids"]) == ([1, 2], [4, 8, 5, 6])
    assert first["response_mask"] == [1, 0, 1, 1]
    assert (first["reward_score"], first["num_turns"]) == (1.0, 4)
    assert first["extra_fields"]["reward_extra_info"] == {"resolved": 1.0}


# --- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["slime", "torchtitan", "verl", "skyrl"])
async def test_parquet_and_json_lines_hold_the_same(
    run: Run, tmp_path: Path, format: Format
) -> None:
    """The file's form changes no token and no reward."""
    await run.add(1.0)
    await run.add(0.0, sample_index=1)
    _, lines = await run.export(format, tmp_path / "out.jsonl")
    _, rows = await run.export(format, tmp_path / "out.parquet")
    if format == "skyrl":
        assert [row["response_ids"] for row in rows] == lines[0]["response_ids"]
        lines = []

    for line, row in zip(lines, rows if lines else [], strict=True):
        same = {name: line[name] for name in row if not isinstance(line[name], dict)}
        assert same == {name: row[name] for name in same}


async def test_a_group_shares_its_index(run: Run, tmp_path: Path) -> None:
    """Samples of an instance share group_index; each rollout has its own index in the run."""
    for sample_index in range(2):
        for instance in ("click-1", "flask-2"):
            await run.add(1.0, TWO_BRANCHES, sample_index, instance)
    _, lines = await run.export("slime", tmp_path / "out.jsonl")

    assert [line["group_index"] for line in lines] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [line["index"] for line in lines] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("format", ["skyrl", "torchtitan", "verl"])
async def test_a_failed_rollout_is_listed_and_not_written(
    run: Run, tmp_path: Path, format: Format
) -> None:
    """Formats that need a reward omit a rollout without one; the report lists it."""
    await run.add(None)
    out = tmp_path / "out.jsonl"
    report = await export_run(run.store, "r", format, out)

    assert (report.written, out.exists()) == (0, False)
    assert "its reward is unknown, not 0" in report.omitted[0].reason


@pytest.mark.parametrize("format", ["skyrl", "torchtitan", "verl", "sft-tokens"])
async def test_a_withheld_reward_is_left_out_and_counted(
    run: Run, tmp_path: Path, format: Format
) -> None:
    """Exports say why; they count it, the signals, and exposures of the run."""
    exposed = Verification(state="exposed", reason="the twin of t passed")
    await run.add(1.0, withheld="unverified, has signals", signals=("a.py: gc (objects)",))
    await run.add(0.0, TWO_BRANCHES, 1, verification=exposed)
    report, _ = await run.export(format, tmp_path / "out.jsonl")

    assert [one.reason for one in report.omitted] == [
        "its reward is withheld: unverified, has signals"
    ]
    assert (report.exposed, report.with_signals, report.withheld_rewards) == (1, 1, 1)


async def test_named_rewards_reach_every_trainer(run: Run) -> None:
    """Next to the reward, as numbers by name; a withheld reward hides them too."""
    named = {"right": 1.0, "tidy": -0.5}
    found = await run.add(1.0, named_rewards=named)
    withheld = await run.add(1.0, TWO_BRANCHES, 1, named_rewards=named, withheld="exposed: t")
    verl = trainer_formats.verl_outputs(found)
    skyrl = trainer_formats.skyrl_output([found])
    titan = trainer_formats.torchtitan_samples(found, group_id=0, advantage=0.0)
    slime = trainer_formats.slime_samples(found, index=0, group_index=0)
    trl = trainer_formats.trl_output([found])
    facts = [
        *(one["extra_fields"] for one in verl),
        *skyrl["env_metrics"],
        *(one["metadata"] for one in (*titan, *slime)),
        *trl["perdure_metadata"],
    ]

    assert len(facts) == 2 * 4 + 1
    assert [one["named_rewards"] for one in facts] == [named] * len(facts)
    assert withheld.episode.named_rewards == {}


async def test_a_withheld_reward_is_not_in_a_baseline(run: Run) -> None:
    """A group without its withheld members has the mean of the others."""
    withheld = "exposed: the twin of t passed"
    found = [
        await run.add(1.0),
        await run.add(0.0, TWO_BRANCHES, 1),
        await run.add(0.0, TWO_BRANCHES, 2, withheld=withheld),
    ]

    advantages = trainer_formats.group_advantages(one.episode for one in found)
    slime = trainer_formats.slime_samples(found[2], index=2, group_index=0)
    assert list(advantages.values()) == [0.5, -0.5]
    assert [sample["metadata"]["rollout_reward"] for sample in slime] == [None]
    assert [sample["metadata"]["withheld"] for sample in slime] == [withheld]
    assert trainer_formats.trl_output([found[2]])["perdure_reward"] == [None]


@pytest.mark.parametrize(("share", "rewards"), [("split", [0.5, 0.5]), ("last", [0.0, 1.0])])
async def test_reward_share_is_a_choice(
    run: Run, tmp_path: Path, share: Any, rewards: list[float]
) -> None:
    """Each segment gets 1/K of the reward, or the last one gets all of it."""
    await run.add(1.0)
    _, lines = await run.export("slime", tmp_path / "out.jsonl", Rules(reward_share=share))

    assert [line["reward"] for line in lines] == rewards


async def test_segments_can_be_cut_by_slimes_tree(run: Run, tmp_path: Path) -> None:
    """`--segments slime` cuts the recorded turns again; the drifted answer is not trained."""
    user, tool = {"role": "user", "content": "do"}, {"role": "tool", "content": "done"}
    said = json.dumps({"role": "assistant", "content": "a"})
    first = turn(0, (7,), (8, 9), new_messages=json.dumps([user]), answer=said)
    second = turn(1, (7, 8, 5), (6,), parent=0, new_messages=json.dumps([tool]), answer=said)
    await run.add(1.0, (first, second))
    _, lines = await run.export("slime", tmp_path / "out.jsonl", Rules(mode="slime"))

    assert [(line["tokens"], line["loss_mask"]) for line in lines] == [([7, 8, 5, 6], [0, 0, 1])]


async def test_the_client_reads_episodes_by_reference(run: Run) -> None:
    """A reference from a workflow is enough to get the segments."""
    found = await run.add(1.0)

    (read,) = await read_episodes([found.episode.ref(run.store.url)], run.store)
    assert read == found


async def test_a_straggler_without_an_episode_is_left_out(run: Run) -> None:
    """A rollout that its group did not wait for has no reference; the others are read."""
    found = await run.add(1.0)
    ref = found.episode.ref(run.store.url)

    assert await read_episodes([ref.model_copy(update={"uri": ""}), ref], run.store) == [found]


async def test_an_episode_of_another_store_is_refused(run: Run, tmp_path: Path) -> None:
    """The error names both stores and the setting to change."""
    found = await run.add(1.0)

    with pytest.raises(ConfigurationError, match="set PERDURE_STORE"):
        await read_episodes([found.episode.ref(run.store.url)], LocalStore(tmp_path / "elsewhere"))


async def test_the_command_takes_the_rules(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`perdure export --format slime` writes the file that the options describe."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERDURE_STORE", str(run.store.root))
    await run.add(1.0)
    out = tmp_path / "out.parquet"
    options = ("--format", "slime", "--reward-share", "split", "--out", str(out))
    code = await asyncio.to_thread(invoke, ["export", "r", *options])

    assert code == 0
    assert pq.read_table(out).column("reward").to_pylist() == [0.5, 0.5]
