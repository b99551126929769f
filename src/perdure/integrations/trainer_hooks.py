"""Shared code of all trainers' hooks: start or join one rollout, wait for it, cancel it with its trainer.

It holds the connection, turns a trainer's sample into a request, and picks the fields of the trainer's
sampling parameters that belong to a rollout.
"""

import asyncio
import contextlib
import difflib
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import structlog

from perdure.client.episode_reader import read_episodes
from perdure.client.sdk import Perdure, RolloutHandle
from perdure.episodes.episode import EpisodeSegments
from perdure.errors import ConfigurationError, InstanceError, NoResult, NotFound
from perdure.instances import instance_catalog
from perdure.instances.rows.format_recognition import recognised
from perdure.instances.rows.row_conversion import to_instance
from perdure.instances.rows.row_fields import Row
from perdure.settings.settings_loader import load_settings
from perdure.storage.store_url import open_store
from perdure.types import EpisodeRef, Instance, RolloutRequest, Sampling, slugify

POLL_S = 1.0
"""How often a hook checks whether its trainer has given up the step."""
RENAMED = {
    "max_new_tokens": "max_tokens_per_turn",
    "max_tokens": "max_tokens_per_turn",
    "max_generate_length": "max_tokens_per_turn",
    "max_output_tokens": "max_tokens_per_turn",
    "sampling_seed": "seed",
}
SAMPLING = frozenset(Sampling.model_fields) - {"max_context_tokens", "decided_by"}
CLIENT_ARGUMENTS = frozenset(
    {
        *("model", "api_key", "api_version", "base_url", "custom_llm_provider", "timeout"),
        *("num_retries", "n", "stream", "logprobs", "skip_special_tokens", "no_stop_trim"),
        *("spaces_between_special_tokens", "include_stop_str_in_output", "token_level_generation"),
        *("modify_params", "drop_params"),
    }
)
"""Fields of an LLM client's configuration that do not affect sampling."""

log = structlog.get_logger()

_connections: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[Perdure]]" = (
    WeakKeyDictionary()
)
_unsaved: dict[str, Instance] = {}
"""Instances from complete rows that a hook got. The first rollout of each puts it into the catalog."""


def sampling_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Sampling` in a trainer's sampling parameters. None and other fields are dropped.

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
    """Refuse a name that is no sampling parameter: callers write these by hand.

    Raises: ConfigurationError, which gives the nearest known name.
    """
    known = {*SAMPLING, *RENAMED}
    for name in sorted(set(parameters) - known - CLIENT_ARGUMENTS):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(sorted(known))}"
        raise ConfigurationError(f"unknown sampling parameter {name!r}: {hint}")


def request_of(
    fields: Mapping[str, Any],
    *,
    step: str,
    instance: Mapping[str, Any] | str,
    sample_index: int,
    sampling: Mapping[str, Any],
) -> RolloutRequest:
    """The request for one sample of a trainer.

    `fields`: fields of a RolloutRequest, with `run_id`, and with `dataset` if rows have only an
    `instance_id`. `step` is appended to the run id. `sampling` overrides the sampling in `fields`,
    because the trainer computes its loss with it. Raises: ConfigurationError.
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
    """The row's reference, the same as after an import of its file."""
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
        "a row needs `instance` (`<dataset>/<instance_id>`). If the hook names a `dataset`, "
        "`instance_id` or the fields of a known format are enough. This row has "
        f"{', '.join(sorted(row)) or 'no field'}{'' if dataset else ', and the hook names no `dataset`'}"
    )


def _converted(fields: Mapping[str, Any], dataset: str) -> Instance | None:
    """Read a complete row. Some formats, like R2E-Gym's and Multi-SWE-bench's, make the id from other
    fields.

    Raises: InstanceError for a row of a known format that lacks a field.
    """
    if not fields.get("data_source"):
        try:
            recognised(Row(1, fields))
        except InstanceError:
            return None
    return to_instance(fields, dataset, 1)


async def connection() -> Perdure:
    """The connection of this event loop. Raises: ConfigurationError if no server answers."""
    loop = asyncio.get_running_loop()
    made = _connections.get(loop)
    if made is None or (made.done() and (made.cancelled() or made.exception())):
        made = _connections[loop] = asyncio.ensure_future(Perdure.connect())
    return await asyncio.shield(made)


async def finished(
    request: RolloutRequest,
    given_up: Callable[[], bool] = lambda: False,
    *,
    routed_experts: bool = False,
) -> EpisodeSegments | None:
    """The rollout's episode, failed or not. None: it ended without an episode, or `given_up()` is true.

    `routed_experts`: the trainer replays experts, so segments without them are left out. The
    rollout is cancelled if the caller is cancelled or gives up. Raises: ConfigurationError.
    """
    perdure = await connection()
    if (read := _unsaved.get(request.instance)) is not None:
        await instance_catalog.save(open_store(load_settings()), read)
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
    return None if ref is None else await _read(ref, routed_experts=routed_experts)


async def _read(ref: EpisodeRef, *, routed_experts: bool) -> EpisodeSegments | None:
    read = await read_episodes([ref], routed_experts=routed_experts)
    if not read or not routed_experts:
        return read[0] if read else None
    found = read[0].with_experts()
    if missing := len(read[0].segments) - len(found.segments):
        log.warning(
            "segments are left out: the trainer replays experts, and engines did not return theirs",
            rollout=found.episode.rollout_id,
            segments=missing,
        )
    return found


async def _leave(waiting: "asyncio.Future[EpisodeRef]", handle: RolloutHandle) -> None:
    if waiting.done():
        return
    waiting.cancel()
    with contextlib.suppress(NotFound):  # it has just ended
        await handle.cancel()
