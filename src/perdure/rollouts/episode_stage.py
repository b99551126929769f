"""The episode stage: assemble one episode from what the other stages stored."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from perdure.episodes.episode import (
    AttemptSummary,
    Episode,
    EpisodeParts,
    ModelUsage,
    same_attempt,
    usage_by_model,
)
from perdure.episodes.episode_assembly import (
    AssembledEpisode,
    Calls,
    assemble,
    assemble_from_earlier,
    calls_of,
)
from perdure.episodes.episode_store import read_episode, write_episode
from perdure.errors import AttemptDamaged, Boundary, NotFound
from perdure.instances import instance_catalog
from perdure.rollouts import grade_stage as grading
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import SANDBOX_LOST, AgentRun, Ending
from perdure.rollouts.boot_stage import BootRecord
from perdure.rollouts.simulated_user.user_turn import UserTurn
from perdure.rollouts.stage_checkpoints import Model
from perdure.sandboxes.base import identity_of
from perdure.storage import store_keys, stored_json
from perdure.storage.base import Store
from perdure.telemetry import metrics
from perdure.types import (
    Adopted,
    EpisodeRef,
    Failure,
    Grade,
    Instance,
    ModelScore,
    PatchRef,
    RolloutStatus,
    TokenCounts,
)

USER_TURN = re.compile(r"/user-\d+\.json$")
MODEL_SCORE = re.compile(r"/reward-model-[^/]+\.json$")
INTERRUPTED = (RolloutStatus.CANCELLED, RolloutStatus.EXPIRED, RolloutStatus.TRUNCATED)
"""Statuses of a rerun that ended without a result."""


async def _no_journal(session: str) -> None:
    raise NotFound(f"no journal of {session}")


async def emit_episode(
    store: Store, ending: Ending, turns_again: Callable[[str], Awaitable[object]] = _no_journal
) -> EpisodeRef:
    """Needs only the store, so that a rollout with a wrong configuration gets an episode too.

    `turns_again`: rebuilds the `turns.parquet` of a session from its journal, or raises NotFound.
    It is called if that file is missing or damaged, before the journal is deleted.
    """
    earlier = await _earlier(store, ending)
    if earlier and earlier.provenance.workflow_run_id == ending.workflow_run_id:
        return earlier.ref(store.url)
    if earlier is not None and _keeps(earlier, ending):
        return earlier.ref(store.url).model_copy(update=_ended(ending))
    parts = _bare(ending) if ending.bare else await _gathered(store, ending)
    discarded, unread = await _discarded(store, ending, parts)
    parts = replace(parts, earlier=earlier, damaged=[*parts.damaged, *unread])
    request = ending.request
    session = identity_of(request.run_id, request.workflow_id, "agent", ending.attempts)
    made = await _assembled(store, parts, discarded, lambda: turns_again(session))
    episode = await write_episode(store, made.episode, made.tokens)
    outcome = episode.outcome.value if episode.outcome else ""
    metrics.rollout(episode.agent, episode.status.value, outcome, episode.sampled_tokens)
    return episode.ref(store.url)


def _keeps(earlier: Episode, ending: Ending) -> bool:
    """An earlier verdict stays if the regrade gave no verdict, or if the rerun was cancelled or
    stopped. An ungraded rollout stays so until a grading gives a verdict. A truncated rollout's
    evidence stays if the rerun ended before a new attempt."""
    if earlier.status is RolloutStatus.TRUNCATED and ending.status in INTERRUPTED:
        return ending.attempts < len(earlier.attempts)
    kept = (RolloutStatus.GRADED, RolloutStatus.UNGRADED, RolloutStatus.ADOPTED)
    if earlier.status not in kept or ending.status is RolloutStatus.GRADED:
        return False
    return ending.status in INTERRUPTED or ending.request.start_at == "grade"


def _ended(ending: Ending) -> dict[str, Any]:
    """How this workflow run ended. The store keeps the earlier verdict."""
    return {
        "status": ending.status,
        "failure": ending.failure,
        "outcome": None,
        "reward": None,
        "withheld": "",
    }


async def _earlier(store: Store, ending: Ending) -> Episode | None:
    try:
        return await read_episode(store, ending.request)
    except ValueError:  # unreadable: the new episode replaces it
        return None


def _bare(ending: Ending) -> EpisodeParts:
    return EpisodeParts(
        request=ending.request,
        status=ending.status,
        started_at=ending.started_at,
        finished_at=time.time(),
        attempts=[AttemptSummary(attempt=number) for number in range(1, ending.attempts + 1)],
        failure=ending.failure,
        stopped_in=ending.stopped_in,
        evictions=ending.evictions,
        workflow_run_id=ending.workflow_run_id,
    )


async def _gathered(store: Store, ending: Ending) -> EpisodeParts:
    """If the stored grade is unreadable, the episode has no verdict but keeps other evidence."""
    try:
        return await _gather(store, ending)
    except AttemptDamaged as error:
        what = str(error).partition("; ")[0]
        lost = Failure(
            boundary=Boundary.STORE,
            type=SANDBOX_LOST,
            message=f"{what}; start the rollout again to grade its patch again",
        )
        failed = {"status": RolloutStatus.FAILED, "failure": lost}
        return await _gather(store, ending.model_copy(update=failed))


async def _gather(store: Store, ending: Ending) -> EpisodeParts:
    """Raises: AttemptDamaged if a graded rollout has no readable grade."""
    damaged: list[str] = []
    numbers = range(1, ending.attempts + 1)
    attempts = [await _attempt(store, ending, number, damaged) for number in numbers]
    last = attempts[-1] if attempts else None
    folder = store_keys.attempt(ending.request, ending.attempts)
    patch = await _evidence(store, f"{folder}/patch.json", PatchRef, damaged)
    grade = await _grade(store, ending, folder, patch)
    if grade is not None and ending.status is RolloutStatus.TRUNCATED:
        withheld = ending.failure.message if ending.failure else ending.status.value
        grade = grade.model_copy(update={"withheld": withheld})
    stages = dict(last.seconds) if last else {}
    if grade is not None:
        stages["grade"] = round(grade.seconds, 3)
    return EpisodeParts(
        request=ending.request,
        status=ending.status,
        started_at=ending.started_at,
        finished_at=time.time(),
        attempts=attempts,
        instance=await _instance(store, ending),
        turns_key=f"{folder}/turns.parquet",
        agent_end=last.agent_end if last else None,
        patch=patch,
        grade=grade,
        adopted=await _adopted(store, ending, damaged),
        user_usage=await _user_usage(store, attempts, damaged),
        judge_usage=await _judge_usage(store, attempts, damaged),
        failure=ending.failure,
        stopped_in=ending.stopped_in,
        stage_seconds=stages,
        evictions=ending.evictions,
        workflow_run_id=ending.workflow_run_id,
        damaged=damaged,
    )


async def _adopted(store: Store, ending: Ending, damaged: list[str]) -> Adopted | None:
    """None if this rollout's own agent made its patch."""
    if not ending.request.adopted_sha256:
        return None
    found = await _evidence(store, store_keys.adopted(ending.request), Adopted, damaged)
    return found if found is not None and found.patch_sha256 else None


async def _user_usage(
    store: Store, attempts: Sequence[AttemptSummary], damaged: list[str]
) -> tuple[ModelUsage, ...]:
    """What the model that played the user cost. Attempts may share a completion, which counts once."""
    found: dict[str, ModelUsage] = {}
    for key in _keys(attempts, USER_TURN):
        turn = await _evidence(store, key, UserTurn, damaged)
        if turn is not None and (made := turn.completion) is not None:
            found[made.id] = ModelUsage(turns=1, **made.model_dump(exclude={"id"}))
    return usage_by_model(found.values())


async def _judge_usage(
    store: Store, attempts: Sequence[AttemptSummary], damaged: list[str]
) -> tuple[ModelUsage, ...]:
    """What the judge cost, also for gradings that gave no verdict."""
    found = []
    for key in _keys(attempts, MODEL_SCORE):
        score = await _evidence(store, key, ModelScore, damaged)
        if score is not None and score.asked_model:  # a reward model behind HTTP reports no tokens
            counts = score.model_dump(include={"model", "asked_model", *TokenCounts.model_fields})
            found.append(ModelUsage(turns=score.calls, **counts))
    return usage_by_model(found)


def _keys(attempts: Sequence[AttemptSummary], names: re.Pattern[str]) -> list[str]:
    return [key for one in attempts for key in one.evidence if names.search(key)]


async def _evidence(store: Store, key: str, model: type[Model], damaged: list[str]) -> Model | None:
    """Read a checkpoint that serves only as evidence. A damaged one is listed in `damaged`."""
    try:
        return await stage_checkpoints.read(store, key, model)
    except AttemptDamaged as error:
        damaged.append(str(error).partition("; ")[0])
        return None


async def _grade(store: Store, ending: Ending, folder: str, patch: PatchRef | None) -> Grade | None:
    """The grade that the workflow's history names, even if a reset has changed the run id.

    Raises: AttemptDamaged.
    """
    informs = ending.status is RolloutStatus.TRUNCATED and ending.grade
    if ending.status is not RolloutStatus.GRADED and not informs:
        return None
    key = f"{folder}/{ending.grade or grading.checkpoint(ending.workflow_run_id)}"
    grade = await stage_checkpoints.read(store, key, Grade)
    problem = ""
    if grade is None:
        problem = "is gone"
    elif patch is not None and grade.patch_sha256 not in ("", patch.sha256):
        problem = "is the grade of another patch"
    if problem:
        raise AttemptDamaged(f"{key} {problem}")
    return grade


async def _attempt(store: Store, ending: Ending, number: int, damaged: list[str]) -> AttemptSummary:
    folder = store_keys.attempt(ending.request, number)
    boot = await _evidence(store, f"{folder}/sandbox.json", BootRecord, damaged)
    run = await _evidence(store, f"{folder}/agent.json", AgentRun, damaged)
    timed = [("boot", boot.seconds if boot else 0.0), ("agent", run.seconds if run else 0.0)]
    return AttemptSummary(
        attempt=number,
        provider=boot.provider if boot else "",
        host=boot.host if boot else "",
        agent_end=run.end if run else None,
        turns=run.turns if run else 0,
        tokens=run.tokens if run else 0,
        model=run.model if run else "",
        turns_sha256=run.turns_sha256 if run else "",
        agent_detail=run.detail if run else "",
        watched_again=run.watched_again if run else False,
        seconds={name: round(seconds, 3) for name, seconds in timed if seconds},
        evidence=tuple([key async for key in store.list(f"{folder}/")]),
    )


async def _assembled(
    store: Store,
    parts: EpisodeParts,
    discarded: Mapping[int, Calls],
    turns_again: Callable[[], Awaitable[object]],
) -> AssembledEpisode:
    """Assemble from the recorded turns. If they are lost, use the earlier episode's tokens, then
    the journal, and otherwise no turns, which the episode says."""
    key = parts.turns_key
    if key is None:
        return await asyncio.to_thread(assemble, parts, None, discarded)
    last = parts.attempts[-1] if parts.attempts else None
    try:
        data = await _data(store, key)
        if data is None and last is not None and last.turns:
            raise ValueError(f"{key} is gone")
        if data is not None and last is not None:
            stored_json.check_file(key, data, last.turns_sha256)
        return await asyncio.to_thread(assemble, parts, data, discarded)
    except ValueError as error:
        problem = str(error)
    if (kept := await _again(store, parts)) is not None:
        return kept
    try:
        await turns_again()
        return await asyncio.to_thread(assemble, parts, await _data(store, key), discarded)
    except NotFound as error:
        lost = f"{problem}, and no journal has its turns ({error}), so this episode has no turns"
    return await asyncio.to_thread(
        assemble, replace(parts, damaged=[*parts.damaged, lost]), None, discarded
    )


async def _again(store: Store, parts: EpisodeParts) -> AssembledEpisode | None:
    """Assemble a regraded attempt from the tokens of its earlier episode, if they are intact."""
    earlier = parts.earlier
    if earlier is None or not earlier.segments or not same_attempt(earlier, parts):
        return None
    tokens = await _data(store, earlier.tokens_key)
    if tokens is None:
        return None
    try:
        stored_json.check_file(earlier.tokens_key, tokens, earlier.tokens_sha256)
        return await asyncio.to_thread(assemble_from_earlier, parts, earlier, tokens)
    except ValueError:
        return None


async def _data(store: Store, key: str) -> bytes | None:
    try:
        return (await store.get(key)).data
    except NotFound:
        return None


async def _discarded(
    store: Store, ending: Ending, parts: EpisodeParts
) -> tuple[dict[int, Calls], list[str]]:
    """The calls of earlier attempts, which count as cost, and problems with unreadable files.

    Reads one file at a time, because a rollout can have many attempts.
    """
    found: dict[int, Calls] = {}
    unread = []
    for one in [] if ending.bare else parts.attempts[:-1]:
        key = f"{store_keys.attempt(ending.request, one.attempt)}/turns.parquet"
        data = await _data(store, key)
        try:
            if data is not None:
                stored_json.check_file(key, data, one.turns_sha256)
                found[one.attempt] = await asyncio.to_thread(calls_of, data)
        except ValueError:
            unread.append(f"{key} is unreadable: the cost of attempt {one.attempt} is unknown")
    return found, unread


async def _instance(store: Store, ending: Ending) -> Instance | None:
    try:
        return await instance_catalog.load(store, ending.request.instance)
    except NotFound:
        return None
