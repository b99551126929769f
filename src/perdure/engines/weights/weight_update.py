"""Updates the weights of running engines: pause, load, finish, resume, and prove the new weights.

A version label proves nothing: weights can change while it stays the same, and a load that reports
success can leave old tensors behind. So each engine must reproduce the trainer's logprobs before it
serves again. A `Transfer` moves the tensors; `FromDisk` is for engines that read a folder themselves.
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

import httpx
import structlog
from pydantic import Field, FiniteFloat, model_validator

from perdure.engines.clients.sglang_control import SglangControl
from perdure.engines.clients.vllm_control import EngineControl, EngineSilent, Scored
from perdure.engines.engine_roster import Roster, SharedRoster
from perdure.engines.engine_state import ANY_START, EngineRecord, EngineState, name_of
from perdure.engines.health_check import Finding, apply
from perdure.engines.model_choice import engines_of
from perdure.errors import Boundary, ConfigurationError, ControlPlaneError, PerdureError
from perdure.storage.base import Store
from perdure.types import DEFAULT_MODEL, Frozen

UPDATE = "update "
"""Prefix of `held_by` while an update holds an engine."""
TOLERANCE = 0.2
"""Allowed difference between the trainer's and the engine's logprob, in bf16. A half-loaded model differs
by whole units. The weights of the previous small training step may differ by less than this."""
NOTHING_READ = ("cannot open the checkpoint", "Failed to get weights iterator")
"""Error texts of an engine that could not open a folder and so kept its weights: of our loader inside
vLLM, and of SGLang's own loader."""
CANARY_SHOWN = 8
"""How many token ids of a prompt a message shows."""
NOTICE_S = 2.5
"""Seconds from the announcement to the pause: twice the gateways' polling interval and a margin, so that
every gateway has read the roster."""
InFlight = Literal["resubmit", "keep"]

log = structlog.get_logger()


class UpdateRefused(PerdureError):
    """The new weights are not served. The message names the engine and the answer to its canary."""

    boundary = Boundary.ENGINE


class WeightCanary(Frozen):
    """A fixed prompt, with the token and logprob that one version of the trainer's model predicts.

    Example:
        WeightCanary(prompt_ids=(785, 4573, 13), token_id=151, logprob=-0.73)
    """

    prompt_ids: tuple[int, ...] = Field(min_length=1)
    token_id: int
    """The greedy next token. Choose prompts for which it is clearly the most likely."""
    logprob: FiniteFloat
    """The logprob of `token_id`, at temperature 1."""
    prompt_logprobs: tuple[FiniteFloat, ...] = ()
    """Teacher-forced logprob of each prompt token from the second on: [P - 1]. Compared by mean absolute
    difference; not compared if empty."""
    tolerance: FiniteFloat = Field(TOLERANCE, gt=0)

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> "WeightCanary":
        given, wanted = len(self.prompt_logprobs), len(self.prompt_ids) - 1
        if given and given != wanted:
            raise ValueError(
                f"{given} prompt_logprobs, but the prompt needs {wanted}: one for each token after "
                "the first"
            )
        return self


Canaries = Sequence[WeightCanary]
"""Use 4 to 8 prompts, because a load can leave some tensors old and one prompt may not show it."""


class Transfer(Protocol):
    """Moves a version's tensors into a paused engine.

    Implement it over NCCL, IPC or RDMA if the trainer sends the tensors itself. `load` is called once per
    engine, between vLLM's start and finish of an update, and may call `control.update_weights` once per
    chunk.
    """

    async def load(self, control: EngineControl, version: int) -> None:
        """Raises: PerdureError. Some tensors may then be new, so the engine gets the previous version or is
        condemned."""
        ...


@dataclass(frozen=True)
class FromDisk:
    """A checkpoint folder that the engines can read."""

    path: Path

    async def load(self, control: EngineControl, version: int) -> None:
        await control.update_weights({"path": str(self.path)})


@dataclass(frozen=True)
class Checkpoint:
    """A version, the source of its weights, and the canaries that prove them."""

    version: int
    source: Transfer
    canaries: Canaries


@dataclass(frozen=True)
class UpdatePolicy:
    """How an update treats calls in flight, and how many engines it updates together.

    `in_flight`: with `resubmit`, calls are aborted, and continue on another engine, or on this one after
    the canaries. With `keep`, calls are frozen, and continue with the new weights before the canaries.
    `at_once`: how many engines are paused together; the others keep serving the old version.
    Raises: ConfigurationError if `at_once` is below 1.
    """

    in_flight: InFlight = "resubmit"
    at_once: int = 1

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ConfigurationError(f"at_once is {self.at_once}: it must be at least 1")


DEFAULT_POLICY = UpdatePolicy()


@dataclass(frozen=True)
class Updated:
    """One engine after its update. `paused_s`: seconds from the pause to the canaries' answers."""

    engine: str
    paused_s: float


class WeightUpdates:
    """Loads a policy version into the engines of a roster.

    Example:
        updates = WeightUpdates(roster, client)
        canary = WeightCanary(prompt_ids=ids, token_id=151, logprob=-0.73)
        await updates.update(8, FromDisk(Path("/ckpt/8")), [canary])
    """

    def __init__(
        self,
        roster: SharedRoster,
        client: httpx.AsyncClient,
        *,
        api_key: str = "",
        control_key: str = "",
        notice_s: float = NOTICE_S,
        default: str = DEFAULT_MODEL,
    ) -> None:
        """`control_key`: used instead of `api_key` for engines behind an `EngineProxy`. `default`: the
        model that the settings name."""
        self._default = default
        self._roster = roster
        self._client = client
        self._api_key, self._control_key = api_key, control_key
        self._notice_s = notice_s

    async def update(
        self,
        version: int,
        source: Transfer,
        canaries: Canaries,
        policy: UpdatePolicy = DEFAULT_POLICY,
        *,
        previous: Checkpoint | None = None,
        model: str = DEFAULT_MODEL,
    ) -> list[Updated]:
        """Update the model's engines that serve, `policy.at_once` at a time. The first failure stops the
        update. Engines that are reserved for a run are not updated, because their trainer does
        that.

        Engines that were not yet reached keep serving the old version. Engines that become ready during
        the update are updated too. If a load fails or a canary differs, `previous` is loaded into the
        engine and must be proven. Without `previous`, or if that also fails, the engine is condemned: it
        serves again only after a restart. Engines that a dead updater left paused are taken over.
        Raises: UpdateRefused; ConfigurationError for a lower version, no canary, or if no engine serves.
        """
        if not canaries:
            raise ConfigurationError(
                "new weights need at least one canary, which proves that they were loaded"
            )
        wanted = Checkpoint(version, source, canaries)
        done: list[Updated] = []
        reached: set[tuple[str, int]] = set()
        await self._leave_out_the_dead(version, model)
        serving = await self._serving(model)
        _check(serving, version, model)
        while lacking := [e for e in serving if _lacks(e, version) and _start(e) not in reached]:
            batch = lacking[: policy.at_once]
            reached.update(map(_start, batch))
            results = await asyncio.gather(
                *(self._one(engine, wanted, policy, previous) for engine in batch),
                return_exceptions=True,
            )
            done += [result for result in results if isinstance(result, Updated)]
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            serving = await self._serving(model)
        return done

    async def _serving(self, model: str) -> list[EngineRecord]:
        engines = engines_of((await self._roster.read()).engines, model, "", self._default)
        return [engine for engine in engines if engine.serves or _left_paused(engine)]

    async def _leave_out_the_dead(self, version: int, model: str) -> None:
        """Record engines whose process has ended, because no gateway may have checked them since.

        Raises: UpdateRefused if an engine only gives no answer, because it may still sample.
        """
        serving = await self._serving(model)
        for engine, silent in zip(
            serving, await asyncio.gather(*map(self._silence, serving)), strict=True
        ):
            if silent is None:
                continue
            if not silent.gone:
                raise UpdateRefused(_not_served(version, silent, engine))
            dead = Finding(EngineState.DEAD, str(silent))
            await self._roster.change(partial(apply, seen=engine, finding=dead))
            log.warning("an engine is gone and gets no weights", engine=engine.name)

    async def _silence(self, engine: EngineRecord) -> EngineSilent | None:
        try:
            await self._control(engine).is_paused()
        except EngineSilent as silent:
            return silent
        except ControlPlaneError:
            return None  # it answers; the update will report the problem
        return None

    async def _one(
        self,
        engine: EngineRecord,
        wanted: Checkpoint,
        policy: UpdatePolicy,
        previous: Checkpoint | None,
    ) -> Updated:
        name = engine.name
        record = await self._hold(name, wanted.version)
        await self._notice(record, untouched=engine.serves)
        started = time.monotonic()
        try:
            await self._load(record, wanted, policy)
        except BaseException as error:
            now = await asyncio.shield(self._back(record, previous, policy, error))
            if not isinstance(error, PerdureError):
                raise
            told = _not_served(wanted.version, error, record)
            raise UpdateRefused(f"{told}. {now}") from error
        paused_s = time.monotonic() - started
        try:
            await self._roster.change(lambda roster: _released(roster, record, wanted.version))
        except UpdateRefused as error:  # another update may have proven its own version
            await self._condemn(record, str(error))
            raise
        log.info(
            "weights updated", engine=name, version=wanted.version, paused_s=round(paused_s, 3)
        )
        return Updated(name, paused_s)

    async def _notice(self, record: EngineRecord, *, untouched: bool) -> None:
        """Wait until no gateway labels tokens with the old version.

        Raises: UpdateRefused if another update took over the engine in the meantime.
        """
        try:
            await asyncio.sleep(self._notice_s)
            now = await self._roster.read()
        except asyncio.CancelledError:
            if untouched:
                await asyncio.shield(self._let_go(record))
            raise
        if not _is_held(now, record):
            raise UpdateRefused(
                f"another update took over engine {record.name} before this one began"
            )

    async def _load(self, record: EngineRecord, wanted: Checkpoint, policy: UpdatePolicy) -> None:
        """Raises: PerdureError."""
        await load(self._control(record), record.wire_model, wanted, policy.in_flight)

    def _control(self, record: EngineRecord) -> EngineControl:
        api_key = self._control_key if record.behind_proxy else self._api_key
        controlled = SglangControl if record.kind == "sglang" else EngineControl
        return controlled(record.url, self._client, api_key=api_key)

    async def _back(
        self,
        record: EngineRecord,
        previous: Checkpoint | None,
        policy: UpdatePolicy,
        error: BaseException,
    ) -> str:
        """Return to the old version and prove it. If that fails, condemn the engine until it restarts.

        A failed load may have changed some tensors by too little for a canary to show it. So the whole
        old version is loaded again, unless the engine could not open the new one.
        Returns the outcome for the engine, as text for people.
        """
        ours = _is_held(await self._roster.read(), record)
        unread = isinstance(error, ControlPlaneError) and any(
            words in str(error) for words in NOTHING_READ
        )
        if ours and unread and await self._resumed(record):
            await self._roster.change(lambda roster: _released(roster, record, record.version))
            return f"Engine {record.name} kept its weights and still serves"
        if ours and previous is not None and isinstance(error, PerdureError):
            try:
                await self._load(record, previous, policy)
                await self._roster.change(
                    lambda roster: _released(roster, record, previous.version)
                )
                return f"Engine {record.name} serves version {previous.version} again"
            except PerdureError as failure:
                log.error("cannot restore the previous weights", error=str(failure))
        await self._condemn(record, f"{record.held_by}: {error}")
        return f"Engine {record.name} is out of use until its process restarts"

    async def _resumed(self, record: EngineRecord) -> bool:
        """Whether the engine samples again, under the label that it had before the update."""
        control = self._control(record)
        try:
            await control.resume()
            label = await control.version()
        except ControlPlaneError:
            return False
        return label is None or record.version in (None, label)

    async def _hold(self, name: str, version: int) -> EngineRecord:
        """Announce the update. Gateways then send no new calls and label no token with a version."""
        why = f"{UPDATE}{version}, {secrets.token_hex(4)}"

        def held(roster: Roster) -> Roster:
            record = roster.get(name)
            if record is None or not (record.serves or _left_paused(record)):
                raise UpdateRefused(f"engine {name} stopped serving before its update")
            if (record.version or 0) > version:
                raise UpdateRefused(
                    f"engine {name} got version {record.version} from another update"
                )
            changes = {"held_by": why, "coming": version, "since": time.time()}
            return roster.having(record.to(EngineState.PAUSED, why, **changes))

        record = (await self._roster.change(held)).get(name)
        assert record is not None
        return record

    async def _let_go(self, record: EngineRecord) -> None:
        """Release an engine that was announced but never paused. Gateways find that it serves."""

        def let_go(roster: Roster) -> Roster:
            if not _is_held(roster, record):
                return roster
            return roster.having(record.model_copy(update={"held_by": "", "coming": None}))

        await self._roster.change(let_go)

    async def _condemn(self, record: EngineRecord, why: str) -> None:
        """Mark the engine as failed until it restarts, because its weights are unknown.

        This includes an engine that another update has just released, because our load may have
        overlapped with it. An engine that the other update still holds is left to that update's canaries.
        """

        def condemned(roster: Roster) -> Roster:
            now = roster.get(record.name)
            if now is None or now.generation != record.generation:
                return roster
            if now.held_by not in ("", record.held_by):
                return roster
            start_id = now.start_id or ANY_START
            changes = {"condemned": start_id, "held_by": "", "coming": None, "version": None}
            return roster.having(now.to(EngineState.DEAD, why, **changes))

        await self._roster.change(condemned)


async def load(control: EngineControl, model: str, wanted: Checkpoint, in_flight: InFlight) -> None:
    """Pause one engine, load a version, resume the engine and check every canary. `model`: the name
    under which it serves.

    Raises: PerdureError. The engine may then have any weights and must not serve.
    """
    await control.pause("abort" if in_flight == "resubmit" else "keep")
    await _begin(control, wanted.version)
    await wanted.source.load(control, wanted.version)
    await control.finish_update(wanted.version)
    await control.resume()
    await asyncio.gather(*(_prove(control, model, one) for one in wanted.canaries))


async def _begin(control: EngineControl, version: int) -> None:
    """Begin an update. If an earlier one was never finished, finish it first, because an engine allows only
    one."""
    try:
        await control.start_update()
    except ControlPlaneError:
        await control.finish_update(version)
        await control.start_update()


async def _prove(control: EngineControl, model: str, canary: WeightCanary) -> None:
    """Raises: UpdateRefused."""
    if (problem := _differs(await _score(control, model, canary), canary)) is not None:
        name = name_of(control.url)
        raise UpdateRefused(
            f"engine {name} does not have the trainer's weights: after the prompt "
            f"{list(canary.prompt_ids)[:CANARY_SHOWN]} of a canary it answers {problem}"
        )


async def _score(control: EngineControl, model: str, canary: WeightCanary) -> Scored:
    forced = bool(canary.prompt_logprobs)
    return await control.score(model, canary.prompt_ids, prompt_logprobs=forced)


def _not_served(version: int, error: PerdureError, engine: EngineRecord) -> str:
    cure = ""
    if isinstance(error, EngineSilent):
        cure = f". Remove it with `perdure engines remove {engine.url}`, then publish again"
    return f"version {version} is not served: {error}{cure}"


def _released(roster: Roster, held: EngineRecord, version: int | None) -> Roster:
    now = roster.get(held.name)
    if now is None or not _is_held(roster, held):
        raise UpdateRefused(
            f"engine {held.name} restarted, or another update took it over, during its update"
        )
    ready = now.to(EngineState.READY, "", held_by="", coming=None, version=version)
    return roster.having(ready)


def _is_held(roster: Roster, held: EngineRecord) -> bool:
    """Whether our update still holds the same start of the engine."""
    now = roster.get(held.name)
    return now is not None and (_start(now), now.held_by) == (_start(held), held.held_by)


def _start(record: EngineRecord) -> tuple[str, int]:
    return record.name, record.generation


def _check(serving: Sequence[EngineRecord], version: int, model: str) -> None:
    """Raises: ConfigurationError."""
    if not serving:
        raise ConfigurationError(
            f"no engine of the model {model} is ready for new weights: wait until `perdure engines "
            "list` shows one as ready, which needs a running gateway"
        )
    newest = max((e.version for e in serving if e.version is not None), default=version)
    if version < newest:
        raise ConfigurationError(
            f"version {version} is older than version {newest}, which an engine serves"
        )


def _lacks(record: EngineRecord, version: int) -> bool:
    return record.version != version or not record.serves


def _left_paused(record: EngineRecord) -> bool:
    """Whether an update holds the engine. A new update may take it over, because the earlier updater may
    be dead. If that one lives, it finds out when it releases the engine, and the canaries prove whose
    weights the engine has."""
    return record.state is EngineState.PAUSED and record.held_by.startswith(UPDATE)


def _differs(scored: Scored, canary: WeightCanary) -> str | None:
    if scored.token_id != canary.token_id or not (
        abs(scored.logprob - canary.logprob) <= canary.tolerance
    ):
        return (
            f"token {scored.token_id} at {scored.logprob:.3f} "
            f"instead of {canary.token_id} at {canary.logprob:.3f}"
        )
    if not canary.prompt_logprobs:
        return None
    pairs = list(zip(scored.prompt_logprobs, canary.prompt_logprobs, strict=True))
    off = sum(abs(theirs - ours) for theirs, ours in pairs) / len(pairs)
    if off <= canary.tolerance:
        return None
    return f"the prompt's logprobs differ from the trainer's by {off:.3f} on average"


@asynccontextmanager
async def downloaded(
    store: Store, prefix: str, into: Path | None = None
) -> AsyncIterator[FromDisk]:
    """A checkpoint in the store, such as `checkpoints/8/`, as a folder that exists inside this context.

    `into`: a parent folder that engines on other hosts can also read. Holds one file at a time in memory.
    Raises: ConfigurationError if the prefix has no object; StoreUnavailable.
    """
    prefix = prefix.strip("/")
    prefix = f"{prefix}/" if prefix else ""
    with tempfile.TemporaryDirectory(prefix="perdure-weights-", dir=into) as folder:
        found = False
        async for key in store.list(prefix):
            path = Path(folder) / PurePosixPath(key.removeprefix(prefix))
            path.parent.mkdir(parents=True, exist_ok=True)
            data = (await store.get(key)).data
            await asyncio.to_thread(path.write_bytes, data)
            found = True
        if not found:
            raise ConfigurationError(f"no checkpoint at {store.url}/{prefix}")
        Path(folder).chmod(0o755)  # an engine may run as another user
        yield FromDisk(Path(folder))


@dataclass(frozen=True)
class FromStore:
    """A checkpoint in the store, which is downloaded while the engine is paused."""

    store: Store
    prefix: str
    into: Path | None = None

    async def load(self, control: EngineControl, version: int) -> None:
        async with downloaded(self.store, self.prefix, self.into) as found:
            await found.load(control, version)
