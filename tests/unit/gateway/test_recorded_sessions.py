"""Recorded Claude Code sessions, replayed on a real gateway core: chains, parents, roots, tokens.

The recordings' answers come from the engine again, as tokens; later requests carry the ids that
the gateway minted for them. Nothing of the recordings is copied here; without them, all skip.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from perdure.dialects import anthropic
from perdure.dialects.base import ModelRequest
from perdure.engines.base import Completion, Engine
from perdure.engines.pool.completion_call import GenerateCall
from perdure.episodes.trajectory_segments import cut
from perdure.gateway.base import SessionSpec
from perdure.gateway.gateway_metrics import Metrics
from perdure.gateway.journal.recorded_turns import turns_of
from perdure.gateway.journal.turn_journal import Journal
from perdure.gateway.journal.turn_record import turn_records
from perdure.gateway.rendering.message_format import load_format
from perdure.gateway.session_manager import Sessions
from perdure.gateway.session_model import ModelLoader, SessionModel
from perdure.storage.local_store import LocalStore
from perdure.testing.scripted_engine import logprob
from perdure.types import FinishReason, Sampling, Turn
from tests.checkout_paths import ROOT
from tests.recordings import answer_ids

RECORDINGS = ROOT.parent / "shared" / "data" / "trajectories" / "claude_code"
FORMAT = load_format("qwen3")


class Speaker:
    """A token engine that gives the answer that it was told, and records its prompts."""

    def __init__(self) -> None:
        self.next: list[int] = []
        self.seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def generate(self, call: GenerateCall) -> Completion:
        ids = self.next
        self.seen.append((tuple(call.prompt_ids), tuple(ids)))
        logprobs = [logprob(token_id, i) for i, token_id in enumerate(ids)]
        return Completion(ids, logprobs, FinishReason.STOP, (), "speaker")

    async def current(self) -> Engine:
        """Stands in for `ConfiguredEngine.current`."""
        return Engine("speaker", tokens=self)

    async def choose(self, name: str, run: str) -> None:
        """Stands in for `ConfiguredEngine.choose`: there is one model."""


class Played(NamedTuple):
    """A recorded session, and how the engine saw it."""

    turns: list[Turn]
    speaker: Speaker


EMPTY = tuple(answer_ids([]))
"""The sampled text of an empty answer."""
SPEC = SessionSpec(session_id="recorded", turns_key="turns.parquet", sampling=Sampling())


def _requests(name: str) -> list[dict[str, Any]]:
    path = RECORDINGS / f"{name}.json"
    if not path.exists():
        pytest.skip(f"no recording {name}")
    found: list[dict[str, Any]] = json.loads(path.read_bytes())["requests"]
    return found


def _request(recorded: dict[str, Any], minted: dict[str, str]) -> ModelRequest:
    text = json.dumps(recorded["body"])
    for theirs, ours in minted.items():
        text = text.replace(theirs, ours)
    return anthropic.parse(text.encode(), recorded["headers"]).request


async def _play(name: str, folder: Path) -> Played:
    speaker = Speaker()
    engines: Any = speaker
    store = LocalStore(folder / "store")
    models = ModelLoader(SessionModel("policy", FORMAT, speaker.current), engines)
    sessions = Sessions(models, store, Metrics(), secret=b"k")
    await sessions.open(SPEC)
    minted: dict[str, str] = {}
    for recorded in _requests(name):
        if recorded["resp"] is None:
            continue
        blocks = recorded["resp"]["blocks"]
        speaker.next = answer_ids(blocks)
        answer = await sessions.complete(SPEC.session_id, _request(recorded, minted))
        theirs = [block["id"] for block in blocks if block["type"] == "tool_use"]
        ours = [call["id"] for call in answer.message.get("tool_calls", ())]
        minted.update(zip(theirs, ours, strict=True))
    records = await Journal(store).read(SPEC.session_id)
    return Played(turns_of(turn_records(records)), speaker)


@pytest.fixture
async def played(request: pytest.FixtureRequest, tmp_path: Path) -> Played:
    return await _play(request.param, tmp_path)


EVERY = ["swe", "subfg", "compact", "retry"]


@pytest.mark.parametrize("played", EVERY, indirect=True)
async def test_recorded_ids_are_what_the_engine_saw(played: Played) -> None:
    """Every turn's prompt and completion equal what the engine saw, in order."""
    recorded = [(turn.prompt_ids, turn.completion_ids) for turn in played.turns]

    assert recorded == played.speaker.seen


@pytest.mark.parametrize("played", EVERY, indirect=True)
async def test_a_child_starts_with_its_parent(played: Played) -> None:
    """A turn with a parent begins with the parent's prompt and completion ids."""
    by_index = {turn.index: turn for turn in played.turns}
    for turn in played.turns:
        if turn.parent is not None:
            parent = by_index[turn.parent]
            held = parent.prompt_ids + parent.completion_ids

            assert turn.prompt_ids[: len(held)] == held


@pytest.mark.parametrize("played", EVERY, indirect=True)
async def test_every_sampled_token_is_trained_once(played: Played) -> None:
    """Cut into segments, every sampled token has mask 1 exactly once, except those of the empty
    answer that the client discarded."""
    trained = sum(sum(segment.loss_mask) for segment in cut(played.turns))
    used = [turn for turn in played.turns if not turn.unused]

    assert trained == sum(len(turn.completion_ids) for turn in used)
    assert [turn.completion_ids for turn in played.turns if turn.unused] in ([], [EMPTY])


@pytest.mark.parametrize(
    ("played", "sampled", "segments"),
    [("swe", 369, 1), ("subfg", 276, 3), ("compact", 213, 5), ("retry", 80, 2)],
    indirect=["played"],
)
async def test_there_are_as_few_segments_as_possible(
    played: Played, sampled: int, segments: int
) -> None:
    """One segment per chain and one per compaction: rewritten inputs and retries do not split
    any."""
    tokens = sum(len(turn.completion_ids) for turn in played.turns)

    assert (tokens, len(cut(played.turns))) == (sampled, segments)


@pytest.mark.parametrize("played", ["subfg"], indirect=True)
async def test_sub_agents_have_separate_chains(played: Played) -> None:
    """A main agent and two sub-agents have three chains, and each turn's parent is in its own
    chain."""
    chains: dict[str, list[int | None]] = {turn.chain: [] for turn in played.turns}
    for turn in played.turns:
        chains[turn.chain].append(turn.parent)

    assert list(chains.values()) == [[None, 0, 5, 6], [None, 1], [None, 2]]
    assert {turn.parent_chain for turn in played.turns if turn.chain != "main"} == {"main"}


@pytest.mark.parametrize("played", ["compact"], indirect=True)
async def test_a_compacted_history_is_a_new_root_with_a_reason(played: Played) -> None:
    """A history that keeps answers is `prefix_changed`; one without answers is `restart`."""
    found = [(turn.parent, turn.bridge_miss) for turn in played.turns]

    assert found == [
        (None, "first"),
        (0, None),
        (0, None),
        (None, "prefix_changed"),
        (3, None),
        (None, "restart"),
        (5, None),
        (None, "restart"),
    ]


@pytest.mark.parametrize("played", ["swe"], indirect=True)
async def test_rewritten_inputs_are_counted(played: Played) -> None:
    """`replace_all: false` and reordered keys do not count as edits, and are recorded."""
    said = [json.loads(turn.answer).get("parent_echo_changes", []) for turn in played.turns]

    assert sum("arguments_normalised" in changes for changes in said) >= 2
    assert not any("text_changed" in changes for changes in said)
