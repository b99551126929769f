"""New weights for running engines: pause, load, finish, resume, and proof that they are what was meant.

A version label proves nothing: weights can change without it, and a load that says it succeeded can
leave old tensors behind. So each engine must give the trainer's own logprobs before it serves again.
How tensors travel is a `Transfer`; engines that read a folder themselves are `FromDisk`.
"""

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

import httpx
import structlog
from pydantic import Field, FiniteFloat, model_validator

from perdure.engines.clients.sglang_control import SglangControl
from perdure.engines.clients.vllm_control import EngineControl, Scored
from perdure.engines.roster import Roster, SharedRoster
from perdure.engines.state import ANY_BOOT, EngineRecord, EngineState, is_fenced, name_of
from perdure.errors import Boundary, ConfigurationError, ControlPlaneError, PerdureError
from perdure.storage.base import Store
from perdure.types import Frozen

UPDATE = "update "
"""How a hold of ours begins, in the roster."""
TOLERANCE = 0.2
"""Between the trainer's logprob and the engine's, in bf16; a model half loaded differs by whole
units, the weights of one small step before may not."""
NOTICE_S = 2.5
"""What every gateway needs to have read the roster: twice its polling, and a little."""
InFlight = Literal["resubmit", "keep"]

log = structlog.get_logger()


class UpdateRefused(PerdureError):
    """The new weights are not served: the message says which engine showed what."""

    boundary = Boundary.ENGINE


class Canary(Frozen):
    """What the trainer's model of one version says of a fixed prompt.

    Example:
        Canary(prompt_ids=(785, 4573, 13), token_id=151, logprob=-0.73)
    """

    prompt_ids: tuple[int, ...] = Field(min_length=1)
    token_id: int
    """The greedy token that follows: choose prompts with a clear winner."""
    logprob: FiniteFloat
    """Its logprob, at temperature 1."""
    prompt_logprobs: tuple[FiniteFloat, ...] = ()
    """Of each prompt token given those before it, from the second on, teacher-forced: [P - 1].
    Compared by their mean distance; not compared when empty."""
    tolerance: FiniteFloat = Field(TOLERANCE, gt=0)

    @model_validator(mode="after")
    def _one_logprob_per_token(self) -> "Canary":
        given, wanted = len(self.prompt_logprobs), len(self.prompt_ids) - 1
        if given and given != wanted:
            raise ValueError(f"{given} prompt_logprobs for a prompt with {wanted} to compare")
        return self


Canaries = Sequence[Canary]
"""4 to 8 prompts tell more than one: a load can leave some tensors old."""


class Transfer(Protocol):
    """How a version's tensors get into a paused engine.

    Implement it over NCCL, IPC or RDMA where the trainer sends them itself: `load` is called between
    vLLM's start and finish of an update, once per engine, and may call `control.update_weights` as
    often as it has chunks.
    """

    async def load(self, control: EngineControl, version: int) -> None:
        """Raises: PerdureError; the engine is then condemned, for its tensors may be half new."""
        ...


@dataclass(frozen=True)
class FromDisk:
    """A checkpoint folder that the engines can read."""

    path: Path

    async def load(self, control: EngineControl, version: int) -> None:
        await control.update_weights({"path": str(self.path)})


@dataclass(frozen=True)
class Checkpoint:
    """A version, where its weights come from, and what proves them."""

    version: int
    source: Transfer
    canaries: Canaries


@dataclass(frozen=True)
class Policy:
    """How an update meets what is in flight.

    `in_flight`: `resubmit` ends completions with what they have and goes on with them elsewhere, or
    here after the canary; `keep` freezes them, and they go on with new weights before the canary.
    `at_once`: engines that are paused together; the others serve on with the old version.
    Raises: ConfigurationError when that is none.
    """

    in_flight: InFlight = "resubmit"
    at_once: int = 1

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ConfigurationError(f"at_once={self.at_once}: an update needs one engine at least")


BY_DEFAULT = Policy()


@dataclass(frozen=True)
class Updated:
    """What an update did to one engine. `paused_s`: seconds from pause to the canary's answer."""

    engine: str
    paused_s: float


class WeightUpdates:
    """Moves a policy version into the engines of a roster.

    Example:
        updates = WeightUpdates(roster, client)
        canary = Canary(prompt_ids=ids, token_id=151, logprob=-0.73)
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
    ) -> None:
        """`control_key`: of engines that Perdure guards, in place of `api_key`."""
        self._roster = roster
        self._client = client
        self._api_key, self._control_key = api_key, control_key
        self._notice_s = notice_s

    async def update(
        self,
        version: int,
        source: Transfer,
        canaries: Canaries,
        policy: Policy = BY_DEFAULT,
        *,
        previous: Checkpoint | None = None,
    ) -> list[Updated]:
        """Every engine that serves, `policy.at_once` at a time; the first refusal stops it.

        Engines not reached yet keep the old version and serve on; those that become ready meanwhile
        are reached too. One whose load failed, or whose canary differs, gets `previous` back and must
        prove that; without it, or when that fails too, it is condemned: it serves again only after a
        restart. What an updater that died left paused is taken over. Raises: UpdateRefused,
        ConfigurationError (a lower version, no canary, or no engine serves).
        """
        if not canaries:
            raise ConfigurationError("weights without a canary are not served: give one at least")
        wanted = Checkpoint(version, source, canaries)
        done: list[Updated] = []
        reached: set[tuple[str, int]] = set()
        serving = await self._serving()
        _check(serving, version)
        while lacking := [e for e in serving if _lacks(e, version) and _boot(e) not in reached]:
            batch = lacking[: policy.at_once]
            reached.update(map(_boot, batch))
            results = await asyncio.gather(
                *(self._one(engine, wanted, policy, previous) for engine in batch),
                return_exceptions=True,
            )
            done += [result for result in results if isinstance(result, Updated)]
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            serving = await self._serving()
        return done

    async def _serving(self) -> list[EngineRecord]:
        return [e for e in (await self._roster.read()).engines if e.serves or _left_paused(e)]

    async def _one(
        self,
        engine: EngineRecord,
        wanted: Checkpoint,
        policy: Policy,
        previous: Checkpoint | None,
    ) -> Updated:
        name = engine.name
        record = await self._hold(name, wanted.version)
        await self._notice(record, untouched=engine.serves)
        started = time.monotonic()
        try:
            await self._load(record, wanted, policy)
        except BaseException as error:
            await asyncio.shield(self._back(record, previous, policy, error))
            if not isinstance(error, PerdureError):
                raise
            raise UpdateRefused(f"version {wanted.version} is not served: {error}") from error
        paused_s = time.monotonic() - started
        try:
            await self._roster.change(lambda roster: _released(roster, record, wanted.version))
        except UpdateRefused as error:  # the other update may be done, and have proven its own
            await self._condemn(record, str(error))
            raise
        log.info(
            "weights updated", engine=name, version=wanted.version, paused_s=round(paused_s, 3)
        )
        return Updated(name, paused_s)

    async def _notice(self, record: EngineRecord, *, untouched: bool) -> None:
        """Until no gateway stamps tokens with the old version any more; nothing is done before.

        Raises: UpdateRefused when somebody else took the engine over meanwhile.
        """
        try:
            await asyncio.sleep(self._notice_s)
            now = await self._roster.read()
        except asyncio.CancelledError:
            if untouched:
                await asyncio.shield(self._let_go(record))
            raise
        if not _is_held(now, record):
            raise UpdateRefused(f"engine {record.name} was taken over before its update")

    async def _load(self, record: EngineRecord, wanted: Checkpoint, policy: Policy) -> None:
        """Raises: PerdureError."""
        api_key = self._control_key if record.guarded else self._api_key
        controlled = SglangControl if record.kind == "sglang" else EngineControl
        control = controlled(record.url, self._client, api_key=api_key)
        served = record.boot if is_fenced(record.model, record.boot) else record.model
        await load(control, served, wanted, policy.in_flight)

    async def _back(
        self,
        record: EngineRecord,
        previous: Checkpoint | None,
        policy: Policy,
        error: BaseException,
    ) -> None:
        """The old version again, proven; else the engine may not serve until it was restarted."""
        ours = _is_held(await self._roster.read(), record)
        if ours and previous is not None and isinstance(error, PerdureError):
            try:
                await self._load(record, previous, policy)
                await self._roster.change(
                    lambda roster: _released(roster, record, previous.version)
                )
                return
            except PerdureError as failure:
                log.error("the old weights do not come back", error=str(failure))
        await self._condemn(record, f"{record.held_by}: {error}")

    async def _hold(self, name: str, version: int) -> EngineRecord:
        """Announced before it is done: gateways send nothing new, and stamp no version."""
        why = f"{UPDATE}{version}, {secrets.token_hex(4)}"

        def held(roster: Roster) -> Roster:
            record = roster.get(name)
            if record is None or not (record.serves or _left_paused(record)):
                raise UpdateRefused(f"engine {name} stopped serving before its update")
            if (record.version or 0) > version:
                raise UpdateRefused(f"engine {name} has version {record.version} meanwhile")
            changes = {"held_by": why, "coming": version, "since": time.time()}
            return roster.having(record.to(EngineState.PAUSED, why, **changes))

        record = (await self._roster.change(held)).get(name)
        assert record is not None
        return record

    async def _let_go(self, record: EngineRecord) -> None:
        """It was announced and not touched: gateways see that it does not stand still."""

        def let_go(roster: Roster) -> Roster:
            if not _is_held(roster, record):
                return roster
            return roster.having(record.model_copy(update={"held_by": "", "coming": None}))

        await self._roster.change(let_go)

    async def _condemn(self, record: EngineRecord, why: str) -> None:
        """Also where another update believes to have released it, and ours came in between; one that
        has it in hand proves it itself."""

        def condemned(roster: Roster) -> Roster:
            now = roster.get(record.name)
            if now is None or now.generation != record.generation:
                return roster
            if now.held_by not in ("", record.held_by):
                return roster
            boot = now.boot or ANY_BOOT
            changes = {"condemned": boot, "held_by": "", "coming": None, "version": None}
            return roster.having(now.to(EngineState.DEAD, why, **changes))

        await self._roster.change(condemned)


async def load(control: EngineControl, model: str, wanted: Checkpoint, in_flight: InFlight) -> None:
    """Pause one engine, give it a version, resume it and ask for every canary. `model`: the name it
    serves under.

    Raises: PerdureError; nobody may be answered by what it has then.
    """
    await control.pause("abort" if in_flight == "resubmit" else "keep")
    await _begin(control, wanted.version)
    await wanted.source.load(control, wanted.version)
    await control.finish_update(wanted.version)
    await control.resume()
    await asyncio.gather(*(_prove(control, model, one) for one in wanted.canaries))


async def _begin(control: EngineControl, version: int) -> None:
    """An update that somebody began and left is ended first: the engine knows one at a time."""
    try:
        await control.start_update()
    except ControlPlaneError:
        await control.finish_update(version)
        await control.start_update()


async def _prove(control: EngineControl, model: str, canary: Canary) -> None:
    """Raises: UpdateRefused."""
    forced = bool(canary.prompt_logprobs)
    scored = await control.score(model, canary.prompt_ids, prompt_logprobs=forced)
    if (problem := _differs(scored, canary)) is not None:
        name = name_of(control.url)
        raise UpdateRefused(f"engine {name} does not have the trainer's weights: {problem}")


def _released(roster: Roster, held: EngineRecord, version: int) -> Roster:
    now = roster.get(held.name)
    if now is None or not _is_held(roster, held):
        raise UpdateRefused(f"engine {held.name} restarted, or was taken over, during its update")
    ready = now.to(EngineState.READY, "", held_by="", coming=None, version=version)
    return roster.having(ready)


def _is_held(roster: Roster, held: EngineRecord) -> bool:
    """Whether the engine is still as we announced it."""
    now = roster.get(held.name)
    return now is not None and (_boot(now), now.held_by) == (_boot(held), held.held_by)


def _boot(record: EngineRecord) -> tuple[str, int]:
    return record.name, record.generation


def _check(serving: Sequence[EngineRecord], version: int) -> None:
    """Raises: ConfigurationError."""
    if not serving:
        raise ConfigurationError(
            "no engine is ready, so none can take new weights: a gateway finds out which are, from "
            "its first call on"
        )
    newest = max((e.version for e in serving if e.version is not None), default=version)
    if version < newest:
        raise ConfigurationError(f"version {version} is older than {newest}, which is served")


def _lacks(record: EngineRecord, version: int) -> bool:
    return record.version != version or not record.serves


def _left_paused(record: EngineRecord) -> bool:
    """Held by an update: another one may go on where that one's process ended. If it has not ended,
    it finds out when it wants to release the engine, and the canaries prove whose weights won."""
    return record.state is EngineState.PAUSED and record.held_by.startswith(UPDATE)


def _differs(scored: Scored, canary: Canary) -> str | None:
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
    return f"the prompt's logprobs are {off:.3f} away from the trainer's on average"


@asynccontextmanager
async def downloaded(
    store: Store, prefix: str, into: Path | None = None
) -> AsyncIterator[FromDisk]:
    """A checkpoint of the store as a folder, while it is needed: `checkpoints/8/`.

    `into`: a folder that the engines of other hosts see too. One file at a time is in memory.
    Raises: ConfigurationError when nothing lies there, StoreUnavailable.
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
        Path(folder).chmod(0o755)  # an engine may run as somebody else
        yield FromDisk(Path(folder))


@dataclass(frozen=True)
class FromStore:
    """A checkpoint of the store, fetched when it is loaded: the engine waits for it."""

    store: Store
    prefix: str
    into: Path | None = None

    async def load(self, control: EngineControl, version: int) -> None:
        async with downloaded(self.store, self.prefix, self.into) as found:
            await found.load(control, version)
