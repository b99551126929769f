"""Shared code of all trainers' hooks: start or join one rollout, wait for it, cancel it with its trainer.

It holds the connection, turns a trainer's sample into a request, and picks the fields of the trainer's
sampling parameters that belong to a rollout.
"""

import asyncio
import contextlib
import difflib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args
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
from perdure.types import EpisodeRef, Instance, RolloutRequest, Sampling, replacement, slugify
from perdure.variant_registry import data_source_named

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
WITHIN = ("instance", "extra_info", "metadata")
"""Columns in which SkyRL's, verl's and slime's datasets have a row's own fields."""

WithoutVerdict = Literal["replace", "drop", "mask", "short"]
"""What a trainer gets for a member of a group that fails without a verdict. `replace`: the sample is
played again, up to 3 times; if all fail, the trainer's default applies. `drop`: the group is not
trained. `mask`: a row without a trained token, which its group's baseline leaves out where the
trainer can. `short`: no row."""
TRAINER_WAITS = {
    "quorum": "how many members it waits for",
    "deadline_s": "how long it waits for a member",
    "stragglers": "which members it cancels, and which it carries over (partial rollouts)",
}
"""Fields of a GroupRequest that a hook does not take -> what the trainer's own settings decide."""

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


def split_without_verdict(
    fields: Mapping[str, Any], trainer: str, default: WithoutVerdict, refused: Mapping[str, str]
) -> tuple[dict[str, Any], WithoutVerdict]:
    """A hook's options without `without_verdict`, and its value. `refused`: the choices that the
    trainer's interface cannot honour, with the reason.

    Raises: ConfigurationError, also for a field of a GroupRequest that only the trainer decides.
    """
    rest = dict(fields)
    choice: WithoutVerdict = rest.pop("without_verdict", default)
    possible = [one for one in get_args(WithoutVerdict) if one not in refused]
    if choice not in possible:
        why = f": {refused[choice]}" if choice in refused else ""
        raise ConfigurationError(
            f"without_verdict is {choice!r}, which {trainer} does not take{why}. Use one of "
            f"{', '.join(possible)}"
        )
    for name in sorted(TRAINER_WAITS.keys() & rest.keys()):
        raise ConfigurationError(
            f"{name} is a field of a GroupRequest: in its own loop, {trainer} decides "
            f"{TRAINER_WAITS[name]}; use its settings"
        )
    return rest, choice


def lacks_verdict(found: EpisodeSegments | None) -> bool:
    """Whether the rollout ended without a verdict. A rollout whose reward is withheld has a verdict."""
    return found is None or not found.episode.has_verdict


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
            "instance": instance_of(instance, dataset),
            "sample_index": sample_index,
            "sampling": told,
        }
    )


def instance_of(row: Mapping[str, Any] | str, dataset: str | None) -> str:
    """The row's reference, the same as after an import of its file. A complete row is kept for its
    first rollout, which puts it into the catalog."""
    if isinstance(row, str) and not row.lstrip().startswith("{"):
        return row
    fields: Mapping[str, Any] = json.loads(row) if isinstance(row, str) else row
    if isinstance(fields.get("instance"), str):
        return str(fields["instance"])
    given = [fields, *(fields.get(name) for name in WITHIN)]
    known = [_plain(one) for one in given if isinstance(one, Mapping)]
    named = next((str(one["instance_id"]) for one in known if one.get("instance_id")), "")
    if dataset and (read := _converted(known, dataset, needed=not named)) is not None:
        _unsaved[read.ref] = read
        return read.ref
    if dataset and named:
        return f"{dataset}/{slugify(named)}"
    raise ConfigurationError(
        "a row needs `instance` (`<dataset>/<instance_id>`). If the hook names a `dataset`, "
        "`instance_id` or the fields of a known format are enough. This row has "
        f"{', '.join(sorted(fields)) or 'no field'}{'' if dataset else ', and the hook names no `dataset`'}"
    )


def _plain(value: Any) -> Any:
    """Lists in place of arrays: verl reads a parquet file's lists as numpy arrays."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value


def _converted(rows: Sequence[Mapping[str, Any]], dataset: str, *, needed: bool) -> Instance | None:
    """The first of these rows that is complete in a known format; None if none is recognised.

    Raises: InstanceError for a row of a known format that lacks a field, if it is `needed`: it has no
    id by which an imported row could be found.
    """
    problem: InstanceError | None = None
    for fields in rows:
        source = str(fields.get("data_source") or "")
        told = dict(fields)
        if source and data_source_named(source) is None and ":" not in source:
            del told["data_source"]  # a trainer's own name, such as verl's for its reward function
        try:
            if not told.get("data_source"):
                recognised(Row(1, told))
        except InstanceError:
            continue
        try:
            return to_instance(told, dataset, 1)
        except InstanceError as error:
            problem = problem or error
    if problem is not None and needed:
        raise problem
    return None


def new_run_id(trainer: str) -> str:
    """A run id for a training that names none. After a restart, it joins no earlier rollout."""
    return f"{trainer}-{time.strftime('%y%m%d%H%M%S')}-{secrets.token_hex(3)}"


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
    kept_tokens: bool = False,
    replaces: bool = False,
) -> EpisodeSegments | None:
    """The rollout's episode, failed or not. None: it ended without an episode, or `given_up()` is true.

    `routed_experts`: the trainer replays experts, so segments without them are left out.
    `kept_tokens`: it normalises over the top-p set of each token, so segments without sets are too.
    `replaces`: a rollout that fails without a verdict is played again, as `replacement` says. After
    a restart, the trainer joins the replacement, because that has the rollout's id. The rollout is
    cancelled if the caller is cancelled or gives up. Raises: ConfigurationError.
    """
    perdure = await connection()
    await _save_row(request.instance)
    first = request.round
    while True:
        ref = await _ended(await perdure.start_rollout(request), given_up)
        if ref is None:
            return None
        found = await _read(ref, routed_experts=routed_experts, kept_tokens=kept_tokens)
        if found is None or not replaces or given_up():
            return found
        # After a restart this may have joined a later round.
        played = request.model_copy(update={"round": max(request.round, found.episode.round)})
        again = replacement(played, ref, first)
        if again is None:
            return found
        log.warning("a rollout without a verdict is replaced", rollout=request.workflow_id)
        request = again


async def _ended(handle: RolloutHandle, given_up: Callable[[], bool]) -> EpisodeRef | None:
    """Wait for a rollout. None: it ended without an episode, or the caller gave it up."""
    waiting = asyncio.ensure_future(handle.result())
    try:
        while not waiting.done() and not given_up():
            await asyncio.wait([waiting], timeout=POLL_S)
        return await waiting if waiting.done() else None
    except NoResult:
        return None
    finally:
        await _leave(waiting, handle)


async def _read(
    ref: EpisodeRef, *, routed_experts: bool, kept_tokens: bool
) -> EpisodeSegments | None:
    read = await read_episodes([ref], routed_experts=routed_experts, kept_tokens=kept_tokens)
    found = read[0] if read else None
    if found is not None and routed_experts:
        found = _with(found.with_experts(), found, "the trainer replays experts")
    if found is not None and kept_tokens:
        found = _with(found.with_kept(), found, "the trainer needs the top-p set of each token")
    return found


async def _save_row(ref: str) -> None:
    """Put the row into the catalog, unless it is there. A row with another content replaces it."""
    if (read := _unsaved.get(ref)) is None:
        return
    store = open_store(load_settings())
    try:
        same = await instance_catalog.load(store, ref) == read
    except (NotFound, InstanceError):
        same = False
    if not same:
        await instance_catalog.save(store, read)
    if _unsaved.get(ref) is read:
        del _unsaved[ref]


def _with(found: EpisodeSegments, whole: EpisodeSegments, reason: str) -> EpisodeSegments:
    if missing := len(whole.segments) - len(found.segments):
        log.warning(
            f"segments are left out: {reason}, and engines did not return theirs",
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
