"""What all trainers' hooks share: one rollout, started or joined, waited for, and left if its trainer leaves.

Owns the connection, the request that a trainer's sample becomes, and which fields of a trainer's sampling
parameters are a rollout's.
"""

import asyncio
import contextlib
import difflib
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from perdure.client.api import Perdure, RolloutHandle
from perdure.client.episodes import read_episodes
from perdure.episodes.episode import EpisodeSegments
from perdure.errors import ConfigurationError, InstanceError, NoResult, NotFound
from perdure.instances import catalog
from perdure.instances.rows.conversion import to_instance
from perdure.instances.rows.fields import Row
from perdure.instances.rows.recognition import recognised
from perdure.settings.load import load_settings
from perdure.storage.base import open_store
from perdure.types import EpisodeRef, Instance, RolloutRequest, Sampling, slugify

POLL_S = 1.0
"""How often a hook looks whether its trainer gave up the step."""
RENAMED = {
    "max_new_tokens": "max_tokens_per_turn",
    "max_tokens": "max_tokens_per_turn",
    "max_generate_length": "max_tokens_per_turn",
    "max_output_tokens": "max_tokens_per_turn",
    "sampling_seed": "seed",
}
SAMPLING = frozenset(Sampling.model_fields) - {"max_context_tokens", "decided_by"}
OF_A_CLIENT = frozenset(
    {
        *("model", "api_key", "api_version", "base_url", "custom_llm_provider", "timeout"),
        *("num_retries", "n", "stream", "logprobs", "skip_special_tokens", "no_stop_trim"),
        *("spaces_between_special_tokens", "include_stop_str_in_output", "token_level_generation"),
        *("modify_params", "drop_params"),
    }
)
"""Fields of an LLM's configuration that say nothing of what is sampled."""

_connections: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[Perdure]]" = (
    WeakKeyDictionary()
)
_unsaved: dict[str, Instance] = {}
"""Instances of rows that a hook was given whole, until the first rollout has put them into the catalog."""


def sampling_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Sampling` that a trainer's sampling parameters name; None and others are dropped.

    Example:
        sampling_of({"temperature": 0.8, "max_new_tokens": 4096, "no_stop_trim": True})
        # {"temperature": 0.8, "max_tokens_per_turn": 4096}
    """
    named = {RENAMED.get(name, name): value for name, value in parameters.items()}
    found = {name: v for name, v in named.items() if name in SAMPLING and v is not None}
    if isinstance(found.get("stop"), str):
        found["stop"] = (found["stop"],)
    return found


def check_sampling_names(parameters: Mapping[str, Any]) -> None:
    """Refuse what a caller writes by hand and no sampling parameter is called.

    Raises: ConfigurationError naming it and the nearest name.
    """
    known = {*SAMPLING, *RENAMED}
    for name in sorted(set(parameters) - known - OF_A_CLIENT):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(sorted(known))}"
        raise ConfigurationError(f"sampling parameter {name!r} is not known: {hint}")


def request_of(
    fields: Mapping[str, Any],
    *,
    step: str,
    instance: Mapping[str, Any] | str,
    sample_index: int,
    sampling: Mapping[str, Any],
) -> RolloutRequest:
    """The request of one sample of a trainer.

    `fields`: fields of a RolloutRequest, with `run_id`, and `dataset` where rows name an `instance_id`
    only. `step` is appended to the run's id. `sampling` wins over that of `fields`, because the trainer
    computes its loss with it. Raises: ConfigurationError.
    """
    shared = dict(fields)
    dataset, run_id = shared.pop("dataset", None), shared.pop("run_id", None)
    if not run_id:
        raise ConfigurationError("the hook needs a `run_id`: it names this training run")
    told = {**(shared.pop("sampling", None) or {}), **sampling}
    return RolloutRequest.model_validate(
        {
            **shared,
            "run_id": f"{run_id}-{step}",
            "instance": _instance(instance, dataset),
            "sample_index": sample_index,
            "sampling": told,
        }
    )


def _instance(row: Mapping[str, Any] | str, dataset: str | None) -> str:
    """The reference under which the import of its file keeps the row."""
    if isinstance(row, str):
        return row
    if isinstance(row.get("instance"), str):
        return str(row["instance"])
    inner = row.get("instance")
    fields = inner if isinstance(inner, Mapping) else row
    if dataset and fields.get("instance_id"):
        return f"{dataset}/{slugify(str(fields['instance_id']))}"
    if dataset and (read := _converted(fields, dataset)) is not None:
        _unsaved[read.ref] = read
        return read.ref
    raise ConfigurationError(
        "a row needs `instance` (`<dataset>/<instance_id>`). Where the hook names a `dataset`, "
        "`instance_id` or the fields of a known format do. This one has "
        f"{', '.join(sorted(row)) or 'no field'}{'' if dataset else ', and the hook names no `dataset`'}"
    )


def _converted(fields: Mapping[str, Any], dataset: str) -> Instance | None:
    """A row of a format that makes the id of other fields, as R2E-Gym's and Multi-SWE-bench's do.

    Raises: InstanceError for a row of a known format that lacks something.
    """
    if not fields.get("data_source"):
        try:
            recognised(Row(1, fields))
        except InstanceError:
            return None
    return to_instance(fields, dataset, 1)


async def connection() -> Perdure:
    """One for each event loop. Raises: ConfigurationError when no server answers."""
    loop = asyncio.get_running_loop()
    made = _connections.get(loop)
    if made is None or (made.done() and (made.cancelled() or made.exception())):
        made = _connections[loop] = asyncio.ensure_future(Perdure.connect())
    return await asyncio.shield(made)


async def finished(
    request: RolloutRequest, given_up: Callable[[], bool] = lambda: False
) -> EpisodeSegments | None:
    """The rollout's episode, failed or not. None: it ended without one, or `given_up` said so.

    The rollout is cancelled when the caller is, or gives up. Raises: ConfigurationError.
    """
    perdure = await connection()
    if (read := _unsaved.get(request.instance)) is not None:
        await catalog.save(open_store(load_settings()), read)
        _unsaved.pop(request.instance, None)
    handle = await perdure.start_rollout(request)
    waiting = asyncio.ensure_future(handle.result())
    try:
        while not waiting.done() and not given_up():
            await asyncio.wait([waiting], timeout=POLL_S)
        ref = await waiting if waiting.done() else None
    except NoResult:
        return None
    finally:
        await _leave(waiting, handle)
    return None if ref is None else await _read(ref)


async def _read(ref: EpisodeRef) -> EpisodeSegments | None:
    found = await read_episodes([ref])
    return found[0] if found else None


async def _leave(waiting: "asyncio.Future[EpisodeRef]", handle: RolloutHandle) -> None:
    if waiting.done():
        return
    waiting.cancel()
    with contextlib.suppress(NotFound):  # it has just ended
        await handle.cancel()
