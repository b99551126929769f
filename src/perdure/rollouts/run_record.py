"""The first request of a run, and each later change of its samples, budget, concurrency, quorum or
deadline."""

import json
import time
from collections.abc import Sequence

from pydantic import JsonValue

from perdure.client import request_comparison
from perdure.errors import NotFound
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import DEFAULT_MODEL, Frozen, RunRequest


class RunChange(Frozen):
    """Example: {"at": 1790000000.0, "by": "ada@head", "fields": {"n_samples": 3},
    "told": ["n_samples: 2 -> 3"]}"""

    at: float
    """Unix seconds."""
    by: str = ""
    """User and host; empty if the run was started by `temporal`, which does not say."""
    fields: dict[str, JsonValue]
    told: tuple[str, ...]
    """Old and new values, formatted for users."""


async def current_request(store: Store, run_id: str) -> RunRequest:
    """The first request with all later changes. Raises: NotFound."""
    return _with(await _first_request(store, run_id), await changes_of(store, run_id))


async def _first_request(store: Store, run_id: str) -> RunRequest:
    try:
        stored = await store.get(store_keys.run(run_id))
    except NotFound:
        raise NotFound(
            f"no run {run_id!r} in {store.url}: `perdure status` lists the runs; "
            "a rollout or group that was started on its own has no run"
        ) from None
    return RunRequest.model_validate(json.loads(stored.data)["request"])


def _with(request: RunRequest, changes: Sequence[RunChange]) -> RunRequest:
    for change in changes:
        request = request.changed(change.fields)
    return request


async def changes_of(store: Store, run_id: str) -> list[RunChange]:
    """The changes in order; empty for an unknown run."""
    found = sorted([key async for key in store.list(store_keys.run_changes(run_id))])
    return [RunChange.model_validate_json((await store.get(key)).data) for key in found]


async def model_of(store: Store, run_id: str) -> str:
    """The model of a run's identity; empty if its agent calls none.

    Raises: NotFound, StoreUnavailable.
    """
    identity = json.loads((await store.get(store_keys.run_identity(run_id))).data)
    asked = str(identity.get("model", ""))
    return str(identity.get("engine.model") or ("" if asked == DEFAULT_MODEL else asked))


async def record(store: Store, now: RunRequest) -> None:
    """Record how this request changes the run. The first request and an equal one change nothing.

    The call is idempotent. A request that arrives after a later one changes nothing either.
    """
    try:
        first = await _first_request(store, now.run_id)
    except NotFound:
        return
    while True:
        changes = await changes_of(store, now.run_id)
        before = _with(first, changes)
        fields = before.changes_to(now)
        is_late = bool(changes) and now.asked_at > 0 and changes[-1].at >= now.asked_at
        if is_late or not fields:
            return
        change = RunChange(
            at=now.asked_at or time.time(),
            by=now.asked_by,
            fields=fields,
            told=tuple(request_comparison.changes(before, now)),
        )
        key = f"{store_keys.run_changes(now.run_id)}{len(changes) + 1:06d}.json"
        if await store.put_if_absent(key, change.model_dump_json(indent=1).encode()):
            return
