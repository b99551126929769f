"""Serves the engines that a trainer has started as one engine of this home's gateways, for all
hooks.

A hook passes its trainer's generate function, or names the trainer's servers. Each trainer process
that serves its function has its own entry in the roster. The trainer updates and pauses its engines
itself: their policy versions are those that it reports, and Perdure's `Weights` class is not used.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import structlog

from perdure.client.sync_client import LoopThread
from perdure.engines.engine_roster import Roster, StoredRoster, roster_key
from perdure.engines.engine_state import EngineRecord, name_of, root_of
from perdure.engines.function_engine import Ask, Sample, Sampled, ServedFunction
from perdure.errors import ConfigurationError, PerdureError
from perdure.home_folder import load_secret
from perdure.integrations import trainer_hooks
from perdure.settings.settings_loader import load_settings
from perdure.storage.store_url import open_store
from perdure.types import DEFAULT_MODEL, FinishReason

REGISTRATION_POLL_S = 15.0
"""Seconds between checks whether the roster still has the engine. A gateway that cannot reach an
engine removes it."""
TRAINER, PERDURE = "trainer", "perdure"
VLLM_SAMPLING = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop"),
        *("stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "logit_bias"),
    }
)
"""The fields of vLLM's `SamplingParams` that are plain JSON."""

log = structlog.get_logger()
_engines_by_run: "dict[str, TrainerEngine]" = {}
"""The engines of this process, by the training run's id."""


class TrainerEngine:
    """A trainer's generate function as an engine, from its first use until `stop`.

    A thread serves it and passes each call to the trainer's event loop, so that it answers health
    checks even while a training step blocks that loop.
    """

    def __init__(
        self,
        accepts: frozenset[str],
        *,
        host: str = "",
        port: int = 0,
        root: str = "",
        run: str = "",
    ) -> None:
        """`accepts`: the sampling parameters that the function applies. `host`: the address at which
        gateways reach this process; by default its own address in its connection to Temporal.
        `root`: the trained model. `run`: a glob of the run ids that it samples for; empty for
        all."""
        self._accepts = accepts
        self._run = run
        self._host, self._port, self._root = host, port, root
        self._trainer: tuple[Sample, asyncio.AbstractEventLoop] | None = None
        """The trainer's function, and the event loop in which it runs."""
        self._thread: LoopThread | None = None
        self._started: Future[None] | None = None
        self._served: ServedFunction | None = None
        self._registration: asyncio.Task[None] | None = None

    async def use(self, sample: Sample) -> None:
        """From now on, sample with this function in the running event loop. The first call
        registers the engine.

        Raises: OSError (the port is taken), ConfigurationError (also if another training's engines would
        sample these runs), StoreUnavailable.
        """
        self._trainer = sample, asyncio.get_running_loop()
        host = self._host
        if self._started is None and not host:
            host = await own_address()
        if self._started is None:
            self._thread = self._thread or LoopThread()
            self._started = asyncio.run_coroutine_threadsafe(self._start(host), self._thread.loop)
        started = self._started
        try:
            await asyncio.shield(asyncio.wrap_future(started))
        except (OSError, PerdureError):
            if self._started is started:
                self._started = None  # the next rollout tries again
            raise

    async def stop(self) -> None:
        """Stop serving, and leave the roster."""
        if self._thread is not None and self._started is not None:
            work = asyncio.run_coroutine_threadsafe(self._stop(), self._thread.loop)
            self._started = None
            await asyncio.wrap_future(work)

    # --- in the thread ---------------------------------------------------------------------------

    async def _start(self, host: str) -> None:
        served = ServedFunction(
            self._sampled, accepts=self._accepts, host=host, port=self._port, root=self._root
        )
        await served.start()
        try:
            await _register(served.url, run=self._run)
        except BaseException:
            await served.stop()
            raise
        self._served = served
        self._registration = asyncio.create_task(self._keep_registered(served.url))
        log.info("serving the trainer's engines to the gateways", url=served.url)

    async def _stop(self) -> None:
        if self._registration is not None:
            self._registration.cancel()
        if self._served is not None:
            url = self._served.url
            with contextlib.suppress(PerdureError):
                await _roster().change(lambda roster: roster.without(name_of(url)))
            await self._served.stop()
            self._served = None

    async def _keep_registered(self, url: str) -> None:
        """Register again if a gateway has removed it, for example after a connection was refused."""
        while True:
            await asyncio.sleep(REGISTRATION_POLL_S)
            try:
                if (await _roster().read()).get(name_of(url)) is None:
                    await _register(url, run=self._run)
            except PerdureError as error:
                log.warning("cannot read or change the roster of engines", error=str(error))

    async def _sampled(self, ask: Ask) -> Sampled:
        assert self._trainer is not None  # set by `use`
        sample, loop = self._trainer
        if loop.is_closed():
            raise RuntimeError("the trainer's event loop has ended")
        work = asyncio.run_coroutine_threadsafe(sample(ask), loop)
        return await asyncio.wrap_future(work)


def engine_of_run(
    fields: Mapping[str, Any], accepts: frozenset[str], *, port: int = 0, root: str = ""
) -> tuple[dict[str, Any], TrainerEngine | None]:
    """A hook's options without `engine` and `engine_host`, and this process's engine of the training run;
    None with `engine: perdure`. Raises: ConfigurationError."""
    rest, uses_trainers = split_engine_option(fields)
    host = str(rest.pop("engine_host", ""))
    if not uses_trainers:
        return rest, None
    run_id = str(rest.get("run_id"))
    made = TrainerEngine(accepts, host=host, port=port, root=root, run=f"{run_id}-*")
    return rest, _engines_by_run.setdefault(run_id, made)


def split_engine_option(fields: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """A hook's options without `engine`, and whether the trainer's engines sample.

    Raises: ConfigurationError.
    """
    rest = dict(fields)
    engine = rest.pop("engine", TRAINER)
    if engine not in (TRAINER, PERDURE):
        raise ConfigurationError(
            f"engine is {engine!r}: use {TRAINER!r} (those that the trainer has started) or "
            f"{PERDURE!r} (those of `perdure engines list`)"
        )
    return rest, engine == TRAINER


def finish_reason_of(ask: Ask, ids: Sequence[int], context: int | None) -> FinishReason:
    """Why a completion ended, for a trainer whose client does not tell. `context`: the most tokens of
    prompt and completion together."""
    if ids and ids[-1] in ask.sampling.get("stop_token_ids", ()):
        return FinishReason.STOP
    is_full = context is not None and len(ask.prompt_ids) + len(ids) >= context
    at_limit = len(ids) >= ask.sampling.get("max_tokens", len(ids) + 1)
    return FinishReason.LENGTH if is_full or at_limit else FinishReason.STOP


async def name_server(url: str, model: str) -> str:
    """Add a vLLM server that the trainer has started, unless it is known. `model`: the name under
    which it serves the model.

    Returns the name by which requests choose its model. Raises: ConfigurationError, StoreUnavailable.
    """
    try:
        name = name_of(url)
    except ValueError as error:
        raise ConfigurationError(f"the trainer's server: {error}") from None
    if (known := (await _roster().read()).get(name)) is not None:
        return known.model
    await _register(root_of(url), model)
    return model


async def own_address() -> str:
    """This host's address in its connection to Temporal, because gateways are in that network too.

    Raises: ConfigurationError.
    """
    server = (await trainer_hooks.connection()).client.service_client.config.target_host
    host, _, port = server.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # sends nothing
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"no IPv4 address of this host reaches {server} ({error}): set `engine_host` to the address "
            "at which gateways reach this host"
        ) from None


async def _register(url: str, model: str = "", run: str = "") -> None:
    """Add the engine with a new generation, because an earlier process may have used its port.

    Raises: ConfigurationError if the runs overlap with another training's.
    """
    model = model or load_settings().engine.model or DEFAULT_MODEL

    def registered(now: Roster) -> Roster:
        _check_apart(now, run)
        record = EngineRecord(
            name=name_of(url),
            url=url,
            model=model,
            run=run,
            generation=now.next_generation,
            since=time.time(),
            of_trainer=True,
        )
        return now.having(record)

    await _roster().change(registered)


def _check_apart(roster: Roster, run: str) -> None:
    """Raises: ConfigurationError. The runs of a training `try-1` also match the glob `try-*` of `try`."""
    for other in roster.engines:
        is_trainings = other.of_trainer and other.run and not other.removed
        if not (run and is_trainings) or other.run == run:
            continue
        mine, theirs = run.removesuffix("*"), other.run.removesuffix("*")
        if mine.startswith(theirs) or theirs.startswith(mine):
            raise ConfigurationError(
                f"engine {other.name} of another training samples the runs {other.run}, which "
                f"overlap with this training's {run}: choose a `run_id` so that neither begins "
                "with the other, or, if that training has ended, run "
                f"`perdure engines remove {other.name}`"
            )


def _roster() -> StoredRoster:
    settings = load_settings()
    return StoredRoster(open_store(settings), roster_key(load_secret(settings)))
