"""A training loop on a whole stack: new weights while groups run, as docs/train.md writes it.

Real Temporal, gateway, workers and sandboxes; two scripted engines, which note themselves what
weights sampled each token. The gateway's records are held against that.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from perdure.client import search_attribute_keys as attributes
from perdure.client.episode_reader import read_episodes
from perdure.client.sdk import GroupHandle
from perdure.engines.engine_roster import StoredRoster, add_engine, roster_key
from perdure.engines.engine_state import EngineSpec, name_of
from perdure.engines.weights.weight_publishing import Weights
from perdure.engines.weights.weight_update import UpdatePolicy, UpdateRefused, WeightCanary
from perdure.episodes import turns_parquet
from perdure.episodes.episode import EpisodeSegments
from perdure.errors import Boundary
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.home_folder import load_secret
from perdure.testing.scripted_engine import WEIGHTS_FILE, Call, logprob
from perdure.types import EpisodeRef, GroupRequest, RolloutRequest, RolloutStatus, Turn
from tests import loop_agent
from tests.stack.gated_engine import HeldEngine, commands
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

pytestmark = [pytest.mark.temporal, pytest.mark.asyncio(loop_scope="module")]

SAMPLES = 2
SLOW_S = 1.0
"""Of eight tokens: a turn then lasts longer than an update of both engines."""
WORDS = " ".join(f"word{n}" for n in range(60))
"""A turn long enough to be met in the middle."""
SCRIPT = {
    "default": {
        "turns": [
            *(
                {
                    "content": WORDS,
                    "tool_calls": [{"name": "bash", "arguments": {"command": command}}],
                }
                for command in commands()
            ),
            {"content": loop_agent.DONE},
        ]
    }
}
TOKENIZER = load_tokenizer("qwen3")
PROMPTS = [
    (
        *TOKENIZER.encode_plain(text),
        TOKENIZER.convert_tokens_to_ids("<|im_start|>"),
        *TOKENIZER.encode_plain("assistant\n"),
    )
    for text in ("The task.", "Another task, a longer one.")
]
FIRST = TOKENIZER.encode_plain("word0")[0]


def canaries(version: int) -> list[WeightCanary]:
    """What a trainer's forward pass with these weights says of two prompts."""
    return [
        WeightCanary(
            prompt_ids=prompt,
            token_id=FIRST,
            logprob=logprob(FIRST, 0, version),
            prompt_logprobs=tuple(
                logprob(token, place, version) for place, token in enumerate(prompt) if place
            ),
            tolerance=0.01,
        )
        for prompt in PROMPTS
    ]


@dataclass
class Loop:
    """A trainer beside a stack with two engines."""

    stack: Stack
    weights: Weights
    engines: list[HeldEngine]
    checkpoints: Path

    def saved(self, version: int, **more: Any) -> Path:
        folder = self.checkpoints / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / WEIGHTS_FILE).write_text(json.dumps({"weights": version, **more}))
        return folder

    async def publish(self, version: int, policy: UpdatePolicy = UpdatePolicy()) -> None:  # noqa: B008
        await self.weights.publish(version, self.saved(version), canaries(version), policy)

    def group(self, run_id: str, version: int, staleness: int, **fields: Any) -> GroupRequest:
        rollout = self.stack.request(
            run_id, policy_version=version, max_staleness=staleness, **fields
        )
        return GroupRequest(rollout=rollout, n_samples=SAMPLES)

    async def in_mid_turn(self, group: GroupRequest) -> GroupHandle:
        """Start it; until every sample is in its second turn, on either engine, slowly from now on."""
        sessions = {
            self.stack.identity(group.rollout.model_copy(update={"sample_index": k}), "agent")
            for k in range(SAMPLES)
        }

        def held() -> bool:
            return {f"{session}-1" for session in sessions} <= {
                name for engine in self.engines for name in engine.waiting
            }

        def sampled() -> bool:
            calls = [call for engine in self.engines for call in engine.calls if call.sampled_by]
            begun = Counter(call.session_id for call in calls)
            return all(begun[session] >= 2 for session in sessions)

        for engine in self.engines:  # a sample that came early would be over before the last begins
            engine.hold(1)
        running = await self.stack.perdure.start_group(group)
        await until(held, "all samples wait for their second turn")
        self.pace(SLOW_S)
        for engine in self.engines:
            engine.let_go()
        await until(sampled, "all samples are in their second turn")
        return running

    def pace(self, chunk_s: float = 0.02) -> None:
        for engine in self.engines:
            engine.control(chunk_delay_s=chunk_s)

    async def read(self, refs: Iterable[EpisodeRef]) -> list[EpisodeSegments]:
        return await read_episodes(refs, self.stack.store)

    # --- recorded and true ---------------------------------------------------------------------

    async def differences(self, found: Iterable[EpisodeSegments]) -> Counter[tuple[int, int]]:
        """How often (recorded version, version that sampled it), over all tokens."""
        seen: Counter[tuple[int, int]] = Counter()
        for one in found:
            attempt = one.episode.attempts[-1].attempt
            session = self.stack.identity(_request(one), "agent", attempt)
            assert one.episode.turns_key is not None
            recorded = turns_parquet.decode(
                (await self.stack.store.get(one.episode.turns_key)).data
            )
            for turn, calls in zip(recorded, self._calls(session), strict=False):
                seen.update(zip(_recorded(turn), self._true(turn, calls), strict=True))
        return seen

    async def mixed_turns(self, found: Iterable[EpisodeSegments]) -> int:
        """Turns that were met in the middle by an update."""
        keys = [one.episode.turns_key or "" for one in found]
        recorded = [
            turn
            for key in keys
            for turn in turns_parquet.decode((await self.stack.store.get(key)).data)
        ]
        return sum(len({span.version for span in turn.versions}) > 1 for turn in recorded)

    def _calls(self, session: str) -> Iterator[list[tuple[str, Call]]]:
        """What the engines did for each turn of a session, in order: (engine, call)."""
        named = [
            (name_of(engine.url), call)
            for engine in self.engines
            for call in engine.calls
            if call.session_id == session
        ]
        by_turn: dict[str, list[tuple[str, Call]]] = {}
        for name, call in sorted(named, key=lambda pair: pair[1].at):
            turn_id = "-".join(call.request_id.removeprefix(session).split("-")[:2])
            by_turn.setdefault(turn_id, []).append((name, call))
        return iter(by_turn.values())

    def _true(self, turn: Turn, calls: list[tuple[str, Call]]) -> list[int]:
        """Each part of a completion is the beginning of what one call of its engine streamed."""
        left, versions = list(calls), []
        for span in turn.engines:
            part = list(turn.completion_ids[span.start : span.end])
            while True:
                name, call = left.pop(0)
                streamed = list(call.completion_ids)[: len(call.sampled_by)]
                if span.engine.endswith(name) and streamed[: len(part)] == part:
                    break
            versions += call.sampled_by[: len(part)]
        return versions


def _request(found: EpisodeSegments) -> RolloutRequest:
    episode = found.episode
    return RolloutRequest(
        run_id=episode.run_id, instance=episode.instance, sample_index=episode.sample_index
    )


def _recorded(turn: Turn) -> list[int]:
    versions = [-1] * len(turn.completion_ids)
    for span in turn.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


@asynccontextmanager
async def looping(home: Path) -> AsyncIterator[Loop]:
    async with running(home) as stack:
        other = HeldEngine()
        for engine in (stack.engine, other):
            engine.control(scripts=SCRIPT)
        stack.engine.weights = other.weights = 1
        roster = StoredRoster(stack.store, roster_key(load_secret(stack.settings)))
        async with other, Weights(stack.settings) as weights:
            await add_engine(roster, EngineSpec(other.url), "policy")

            async def both() -> bool:
                return sum(engine.serves for engine in (await roster.read()).engines) == 2

            # The gateway asks its engines when the first call comes, so let one come.
            await stack.episode(await stack.start("first"))
            await until(both, "both engines serve")
            loop = Loop(stack, weights, [stack.engine, other], home / "checkpoints")
            loop.pace()
            yield loop


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Loop]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with looping(tmp_path_factory.mktemp("loop")) as loop:
        yield loop


@pytest.mark.longer
async def test_weights_are_updated_while_groups_run(loop: Loop) -> None:
    """Two steps of the loop: what each engine sampled with is what the trainer reads."""
    await loop.publish(1)
    group = loop.group("step-1", 1, staleness=1)
    running = await loop.in_mid_turn(group)
    await loop.publish(2)
    loop.pace()
    first = await loop.read([ref async for ref in running.refs()])
    following = await loop.stack.perdure.start_group(loop.group("step-2", 2, staleness=0))
    second = await loop.read([ref async for ref in following.refs()])

    seen = await loop.differences(first)
    seen_later = await loop.differences(second)
    assert [one.episode.reward for one in (*first, *second)] == [1.0] * 2 * SAMPLES
    assert {pair for pair in seen if pair[0] != pair[1]} == set()
    assert {recorded for recorded, _ in seen} == {1, 2}
    assert await loop.mixed_turns(first) > 0
    assert set(seen_later) == {(2, 2)}
    assert [one.episode.policy_version_max for one in second] == [2] * SAMPLES
    assert (await loop.weights.published()).version == 2  # type: ignore[union-attr]


@pytest.mark.longer
async def test_a_failed_canary_disturbs_no_group(loop: Loop) -> None:
    """A load without effect: the version before serves on, and its groups are graded."""
    group = loop.group("step-3", 2, staleness=0)
    running = await loop.in_mid_turn(group)
    with pytest.raises(UpdateRefused, match="trainer's weights"):
        await loop.weights.publish(3, loop.saved(3, stale=True), canaries(3))
    loop.pace()
    found = await loop.read([ref async for ref in running.refs()])

    assert [one.episode.reward for one in found] == [1.0] * SAMPLES
    assert set(await loop.differences(found)) == {(2, 2)}
    assert (await loop.weights.published()).version == 2  # type: ignore[union-attr]


@pytest.mark.longer
async def test_a_group_held_to_older_weights_ends_without_a_reward(loop: Loop) -> None:
    """Its rollouts fail as such, at once, and nothing that the new weights said is in them."""
    group = loop.group("step-4", 2, staleness=0)
    running = await loop.in_mid_turn(group)
    await loop.publish(4, UpdatePolicy(in_flight="keep"))
    loop.pace()
    refs = [ref async for ref in running.refs()]
    described = await loop.stack.perdure.rollout(_workflow_id(refs[0], "step-4")).handle.describe()
    found = await loop.read(refs)

    causes = [(ref.failure.boundary, ref.failure.type) for ref in refs if ref.failure]
    listed = described.typed_search_attributes
    assert causes == [(Boundary.ENGINE, "PolicyTooStale")] * SAMPLES
    assert [(ref.status, ref.reward) for ref in refs] == [(RolloutStatus.FAILED, None)] * SAMPLES
    assert set(await loop.differences(found)) == {(2, 2)}
    assert listed.get(attributes.POLICY_VERSION) == 2
    assert listed.get(attributes.FAILURE) == "engine:PolicyTooStale"


@pytest.mark.longer
@pytest.mark.parametrize(("in_flight", "version"), [("keep", 5), ("resubmit", 6)])
async def test_a_group_that_becomes_too_stale_may_finish(
    loop: Loop, in_flight: Any, version: int
) -> None:
    """The new weights continue it, from its tokens so far. It is graded, each token keeps its version in
    the turns, and none is trained."""
    group = loop.group(f"step-{version}", version - 1, staleness=0, too_stale="finish")
    running = await loop.in_mid_turn(group)
    await loop.publish(version, UpdatePolicy(in_flight=in_flight))
    loop.pace()
    refs = [ref async for ref in running.refs()]
    found = await loop.read(refs)

    why = f"sampled by policy versions {version - 1} to {version}; with max_staleness 0, "
    assert [(ref.reward, ref.trainable, ref.trained_tokens) for ref in refs] == [
        (1.0, False, 0)
    ] * SAMPLES
    assert all(one.episode.too_stale.startswith(why) for one in found)
    assert not any(any(segment.loss_mask) for one in found for segment in one.segments)
    assert set(await loop.differences(found)) == {(version - 1,) * 2, (version,) * 2}
    assert await loop.mixed_turns(found) > 0


def _workflow_id(ref: EpisodeRef, run_id: str) -> str:
    return f"rollout/{run_id}/{ref.instance_id}/{ref.sample_index}"
