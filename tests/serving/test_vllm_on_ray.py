"""Real agents on a real vLLM on CPU, placed by Ray; part of `make test-serving` (slow).

One engine serves both rollouts. Its model says noise, so nothing is solved: what is checked is that
the store holds vLLM's own ids, logprobs and versions, against its tokenizer and a second reading.
"""

import json
import shutil
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from perdure.episodes import turns_parquet
from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import read_run
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import Turn
from tests.real.test_vllm import (
    PREFILL_TOLERANCE,
    ROOT,
    SERVER,
    _rescored,
    _toy,
    installed,
    perdure,
)

__all__ = ["installed"]  # a fixture
CONTEXT = 32_768
"""Claude Code opens with thousands of tokens of system prompt and tools."""
ANSWER = 32
TURNS = 3
FIRST_ADDED = 151_643
"""Of Qwen's ids: `<|endoftext|>` and what follows it."""
STEP = 41
"""The policy version that the engine is labelled with."""


@dataclass
class Live:
    """A laptop stack on one replica that Ray placed."""

    home: Path
    url: str

    async def rollout(self, agent: str, options: Mapping[str, str]) -> tuple[Episode, list[Turn]]:
        """Play one to its end; the episode and its turns as the store holds them."""
        wishes = {"sampling.max_tokens_per_turn": str(ANSWER), **options}
        chosen = [word for name, value in wishes.items() for word in ("--set", f"{name}={value}")]
        words = ("toys/add", "--agent", agent, "--run-id", agent, *chosen, "--wait")
        await perdure(self.home, "run", *words, PERDURE_ENGINE__KIND="vllm")
        store = LocalStore(self.home / "store")
        (episode,) = await read_run(store, agent)
        assert episode.turns_key is not None
        return episode, list(turns_parquet.decode((await store.get(episode.turns_key)).data))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    """One engine for all tests here: it takes a minute and 3.3 GB."""
    if missing := BubblewrapProvider(Settings(home=tmp_path_factory.getbasetemp())).check():
        pytest.skip("; ".join(missing))
    home = tmp_path_factory.mktemp("h")
    shared_tools = ROOT / ".perdure/tools"  # agents are installed once for all tests
    shared_tools.mkdir(parents=True, exist_ok=True)
    (home / "tools").symlink_to(shared_tools)
    try:
        await _up(installed, home)
        yield Live(home, await _labelled(home))
    finally:
        await perdure(home, "down")
        await perdure(home, "engines", "down")
        shutil.rmtree(home, ignore_errors=True)


async def _up(installed: Path, home: Path) -> None:
    await _toy(home)
    arguments = f"--enforce-eager --max-model-len {CONTEXT}"
    words = ["--model", str(installed / "model"), "--gpus-per-replica", "0"]
    words += ["--executable", str(installed / "venv/bin/vllm"), "--vllm-args", arguments]
    for name, value in SERVER.items():
        words += ["--env", f"{name}={value}"]
    await perdure(home, "engines", "up", "--cpus-per-replica", "0.5", *words)


async def _labelled(home: Path) -> str:
    """The replica's URL, once its weights bear a version."""
    (path,) = (path for path in (home / "store/engines").glob("*.replicas.json"))
    url = f"http://{json.loads(path.read_text())['replicas'][0]['engine']}"
    async with httpx.AsyncClient(trust_env=False) as client:
        label = {"new_version": f"step-{STEP}"}
        (await client.post(f"{url}/update_weight_version", json=label)).raise_for_status()
    return url


@pytest.mark.parametrize(
    ("agent", "options"),
    [
        ("mini_swe_agent", {"agent_options.step_limit": str(TURNS)}),
        # An answer of noise up to the cap makes it ask for the rest; it gives up after the fourth.
        ("claude_code", {"sampling.max_context_tokens": str(CONTEXT)}),
    ],
)
async def test_an_agent_on_a_real_engine_leaves_what_vllm_sampled(
    live: Live, agent: str, options: Mapping[str, str]
) -> None:
    """vLLM tokenises every prompt's text to the recorded ids. A second pass gives each sampled
    token its recorded logprob. Each token has its engine, generation and policy version."""
    episode, recorded = await live.rollout(agent, options)

    assert len(recorded) >= TURNS
    used = [turn for turn in recorded if not turn.unused]  # mini-swe-agent drops a cut answer
    assert episode.trained_tokens == sum(len(turn.completion_ids) for turn in used)
    for turn in recorded:
        _spans_cover(turn, live.url)
    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        reader = Reader(client, live.url)
        gaps = [gap for turn in recorded for gap in await reader.gaps(turn)]
        await reader.read_prompts(recorded)
    spread = statistics.stdev(value for turn in recorded for value in turn.logprobs)
    # A small random model finds most tokens nearly as likely: the bound must tell them apart.
    assert max(gaps) < min(PREFILL_TOLERANCE, spread / 10)
    print(
        f"\n{agent}: {len(recorded)} turns, prompts of "
        f"{min(len(t.prompt_ids) for t in recorded)} to {max(len(t.prompt_ids) for t in recorded)} "
        f"tokens; {len(gaps)} logprobs (spread {spread:.3f}), off by {statistics.mean(gaps):.5f} on "
        f"average, {max(gaps):.5f} at most; {reader.tokens} prompt ids read again in {reader.runs} runs"
    )


def _spans_cover(turn: Turn, url: str) -> None:
    length = len(turn.completion_ids)
    versions = [(span.version, span.start, span.end) for span in turn.versions]
    engines = [(span.generation, span.start, span.end) for span in turn.engines]

    assert (versions, engines) == ([(STEP, 0, length)], [(1, 0, length)])
    assert url.removeprefix("http://") in turn.engines[0].engine


@dataclass
class Reader:
    """vLLM's own reading of what was recorded."""

    client: httpx.AsyncClient
    url: str
    runs: int = 0
    tokens: int = 0
    _known: set[tuple[int, ...]] = field(default_factory=set)

    async def gaps(self, turn: Turn) -> list[float]:
        """How far each recorded logprob is from the one of reading prompt and completion at once."""
        ids = [*turn.prompt_ids, *turn.completion_ids]
        again = await _rescored(self.client, self.url, ids, len(turn.prompt_ids))
        return [abs(a - b) for a, b in zip(turn.logprobs, again, strict=True)]

    async def read_prompts(self, recorded: Sequence[Turn]) -> None:
        """Every id of every prompt that was not sampled is what vLLM makes of its text."""
        sampled = [tuple(turn.completion_ids) for turn in recorded]
        for turn in recorded:
            for run in _plain_runs(_without(turn.prompt_ids, sampled)):
                if tuple(run) not in self._known:
                    self._known.add(tuple(run))
                    await self._read(run)

    async def _read(self, run: list[int]) -> None:
        text = await self._text(run)
        asked = {"model": "policy", "prompt": text, "add_special_tokens": False}
        read = (await self._ask("tokenize", asked))["tokens"]
        if any(token >= FIRST_ADDED for token in read):
            # An added token's name in plain text is text to us, for an agent may print it; vLLM's
            # route reads the token. Such a run is compared as text.
            assert await self._text(read) == text
        else:
            assert read == run
        self.runs += 1
        self.tokens += len(run)

    async def _text(self, ids: list[int]) -> str:
        return str((await self._ask("detokenize", {"model": "policy", "tokens": ids}))["prompt"])

    async def _ask(self, route: str, body: object) -> dict[str, list[int]]:
        answer = await self.client.post(f"{self.url}/{route}", json=body)
        told: dict[str, list[int]] = answer.raise_for_status().json()
        return told


def _without(ids: Sequence[int], sampled: Sequence[tuple[int, ...]]) -> list[int]:
    """A prompt with an added token in the place of each completion that it carries on."""
    kept, at = [], 0
    while at < len(ids):
        found = next((s for s in sampled if s and tuple(ids[at : at + len(s)]) == s), None)
        kept.append(FIRST_ADDED if found else ids[at])
        at += len(found) if found else 1
    return kept


def _plain_runs(ids: Sequence[int]) -> list[list[int]]:
    """The text between added tokens."""
    runs: list[list[int]] = [[]]
    for token in ids:
        if token >= FIRST_ADDED:
            runs.append([])
        else:
            runs[-1].append(token)
    return [run for run in runs if run]
