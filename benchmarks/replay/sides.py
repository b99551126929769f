"""One run through the whole stack, with or without killed sandboxes; then which tokens were sampled.

The engine counts sampled tokens by session, and one session is one sandbox.
"""

import asyncio
import difflib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.endpoint import Endpoint
from benchmarks.perdure_stack import Home, Stack, right_answers
from perdure.episodes import turns_parquet
from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import read_run
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.gateway.turns.canonical import VOLATILE
from perdure.sandboxes.base import identity_of
from perdure.sandboxes.host.box import Box
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.tree import Settings
from perdure.storage import keys
from perdure.storage.base import open_store
from perdure.types import Turn

PAUSE_S = 0.02
NUMBER = re.compile(r"\d+")
RECORDING_ENDED = "the recording ended"


@dataclass(frozen=True)
class Job:
    """`kill_at`: the turn after which each sandbox is killed; None = none is killed."""

    name: str
    run_id: str
    arguments: tuple[str, ...]
    rollouts: int
    kill_at: int | None


@dataclass(frozen=True)
class Result:
    """Sums over the rollouts. Tokens are completion tokens."""

    name: str
    rollouts: int
    right: int
    lost: int
    """Sandboxes that were killed."""
    wall_s: float
    before_loss: int
    """Sampled for sandboxes that were lost."""
    after_loss: int
    """Sampled for sandboxes that completed."""
    replayed: int
    episode: int
    """Tokens of the final trajectories."""
    ends: dict[str, int]
    """Why replay ended, and in how many rollouts."""
    ended_at: tuple[int | None, ...]
    """The first turn that was sampled again, by rollout."""

    @property
    def share(self) -> float:
        """Share of the tokens sampled before the loss that were not sampled again."""
        return self.replayed / self.before_loss if self.before_loss else 0.0

    @property
    def is_whole(self) -> bool:
        """Every token of the trajectories was either replayed or sampled after the loss."""
        return self.right == self.rollouts and self.replayed + self.after_loss == self.episode


def measure(home: Home, stack: Stack, endpoint: Endpoint, job: Job) -> Result:
    count = str(job.rollouts)
    arguments = [*job.arguments, "-l", count, "-c", count, "--run-id", job.run_id]
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stack.run, arguments, home.folder / f"{job.run_id}.log")
        lost = _kill_each(home, endpoint, job, running)
        document = running.result()
    wall = time.monotonic() - began
    episodes = asyncio.run(read_run(open_store(home.settings), job.run_id))
    bought = _bought(endpoint)
    first = sum(bought[_session(e, 1)] for e in episodes if len(e.attempts) > 1)
    ends = [asyncio.run(_end(home, episode)) for episode in episodes if len(episode.attempts) > 1]
    return Result(
        name=job.name,
        rollouts=job.rollouts,
        right=right_answers(document),
        lost=lost,
        wall_s=wall,
        before_loss=first,
        after_loss=sum(bought.values()) - first,
        replayed=sum(e.trajectory.replayed_tokens for e in episodes),
        episode=sum(e.trajectory.sampled_tokens for e in episodes),
        ends=dict(Counter(ends)),
        ended_at=tuple(e.trajectory.replay_ended_at for e in episodes),
    )


def _kill_each(home: Home, endpoint: Endpoint, job: Job, running: "Future[dict[str, Any]]") -> int:
    """SIGKILL the keeper of each first sandbox once its session has had that many turns."""
    if job.kill_at is None:
        return 0
    killed: set[str] = set()
    root = BubblewrapProvider(Settings(home=home.folder)).root
    while len(killed) < job.rollouts and not running.done():
        for session, calls in endpoint.stats()["calls_by_session"].items():
            if calls < job.kill_at or session in killed or not session.endswith("-agent-1"):
                continue
            if (holder := Box(root / session).holder) is not None:
                os.kill(holder.pid, signal.SIGKILL)
                killed.add(session)
        time.sleep(PAUSE_S)
    return len(killed)


def _bought(endpoint: Endpoint) -> Counter[str]:
    """Completion tokens by session."""
    tokens: Counter[str] = Counter()
    for call in endpoint.sampled():
        tokens[call["session_id"]] += len(call["completion_ids"])
    return tokens


def _session(episode: Episode, attempt: int) -> str:
    rollout = f"rollout/{episode.run_id}/{episode.instance_id}/{episode.sample_index}"
    return identity_of(episode.run_id, rollout, "agent", attempt)


async def _end(home: Home, episode: Episode) -> str:
    """Why the successor's replay ended: how its first new request differs from the recorded ones."""
    lost, final = [await _turns(home, episode, n) for n in (1, len(episode.attempts))]
    at = episode.trajectory.replay_ended_at
    if episode.trajectory.replayed_turns == len(lost):
        return RECORDING_ENDED
    if at is None:
        return "nothing was replayed" if not episode.trajectory.replayed_turns else "unknown"
    return _difference(lost[at], final[at])


async def _turns(home: Home, episode: Episode, attempt: int) -> Sequence[Turn]:
    rollout = keys.rollout(episode.run_id, episode.instance_id, episode.sample_index)
    stored = await open_store(home.settings).get(f"{rollout}/attempts/{attempt}/turns.parquet")
    return turns_parquet.decode(stored.data)


def _difference(one: Turn, other: Turn) -> str:
    """The first line in which two prompts differ, without its numbers."""
    read = load_tokenizer("qwen3").decode
    texts = [VOLATILE.sub("*", read(list(turn.prompt_ids))) for turn in (one, other)]
    before, after = (text.splitlines() for text in texts)
    marked = [line for line in difflib.ndiff(before, after) if line[:1] in "-+"]
    return NUMBER.sub("#", " / ".join(line[:60] for line in marked[:1])) or "the same prompt"
