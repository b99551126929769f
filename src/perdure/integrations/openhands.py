"""Document 003's server on top of the SDK. Its jobs are rollouts, so a restart loses none.

server = OpenHandsServer(llm_server_addresses=["http://localhost:8000/v1"], agent="mini_swe_agent")
server.start()
result = server.process(instance, {"temperature": 0.8, "max_iterations": 30})
server.stop()

`python -m perdure.integrations.openhands_http` serves the HTTP verbs of that document's repository. The
handlers are those of `perdure.data_source_handlers`.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from temporalio.client import WorkflowExecutionStatus

from perdure.client import search_attribute_keys as attributes
from perdure.client import temporal_names
from perdure.client.sdk import Perdure, RolloutHandle
from perdure.client.sync_client import LoopThread
from perdure.client.temporal_server import configured_address
from perdure.engines.engine_roster import StoredRoster, add_engine, remove_engine, roster_key
from perdure.engines.engine_state import EngineSpec
from perdure.episodes import turns_parquet
from perdure.episodes.episode import Episode, parse_episode
from perdure.errors import Cancelled, ConfigurationError, NoResult, NotFound
from perdure.home_folder import load_secret
from perdure.instances import instance_catalog
from perdure.integrations import openhands_jobs as jobs
from perdure.integrations.openhands_jobs import JobDetails, JobRecord
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings, SlotSettings
from perdure.storage import store_keys, stored_json
from perdure.storage.base import Store
from perdure.storage.store_url import open_store
from perdure.types import DEFAULT_MODEL, EpisodeRef, RolloutStatus, Slug
from perdure.variant_registry import AGENTS, load

logger = logging.getLogger(__name__)
T = TypeVar("T")
Address = str | tuple[str, float]
"""The URL of an inference server, alone or with its weight."""

LOOK_S = 2.0
"""How often a waiting call checks its job's progress."""


class ServerNotRunning(ConfigurationError):
    """`start` was not called, or `stop` was called since."""


class OpenHandsServer:
    """`process` may be called from many threads; each call waits for its own job.

    Jobs run in the workers of this home's stack, or in those of the Temporal server that
    TEMPORAL_ADDRESS names. If no stack runs, `start` starts one with the worker counts given here; a
    running stack keeps its own. The workers must know your own `data_source` too (PERDURE_HANDLERS).
    """

    def __init__(
        self,
        llm_server_addresses: Iterable[Address] = (),
        max_init_workers: int = 6,
        max_run_workers: int = 5,
        max_eval_workers: int | None = None,
        allow_skip_eval: bool = True,
        *,
        name: Slug = "openhands",
        settings: Settings | None = None,
        **rollout: Any,
    ) -> None:
        """`name`: the server's name; job ids are unique within it. `rollout`: fields of a
        RolloutRequest for all jobs (agent, sandbox, agent_budget_s, ...). Raises: ConfigurationError.
        """
        if not isinstance(allow_skip_eval, bool):
            raise ConfigurationError(f"allow_skip_eval: must be a bool, is {allow_skip_eval!r}")
        self._name = name
        self._settings = (settings or load_settings()).changed(
            slots={
                "boot": max_init_workers,
                "agent": max_run_workers,
                "grade": max_run_workers if max_eval_workers is None else max_eval_workers,
            }
        )
        self._addresses = list(llm_server_addresses)
        self._rollout = {
            "agent": "openhands",
            "model": self._settings.engine.model or DEFAULT_MODEL,
            **rollout,
            "grade_empty_patch": not allow_skip_eval,
        }
        self._store: Store = open_store(self._settings)
        roster = roster_key(load_secret(self._settings))
        self._roster = StoredRoster(self._store, roster)
        self._loop = LoopThread()
        self._perdure: Perdure | None = None
        self._started_stack = False
        self._jobs: dict[str, JobDetails] = {}
        self._waiting: set[asyncio.Task[dict[str, Any]]] = set()

    @property
    def slots(self) -> SlotSettings:
        """The worker pools of a stack that `start` starts."""
        return self._settings.slots

    # --- life ------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._perdure is not None

    def start(self) -> None:
        """Add the LLM servers, start a stack if none runs, and connect. Repeating this is harmless.

        Raises: ConfigurationError, StackFailed.
        """
        if self.running:
            return
        for address in self._addresses:
            self.add_llm_server(address)
        if configured_address(self._settings) is None:
            from perdure.stack import stack_lifecycle

            _, self._started_stack = stack_lifecycle.ensure_up(self._settings, "", logger.info)
        self._perdure = self._loop.do(Perdure.connect(settings=self._settings))

    def stop(self) -> None:
        """Waiting calls raise `Cancelled`. Their jobs continue, and the same job id joins them again.

        A stack that `start` started is shut down; its jobs continue at the next start.
        """
        self._perdure = None
        self._loop.do(self._leave())
        if self._started_stack:
            from perdure.stack import stack_lifecycle

            stack_lifecycle.shut_down(self._settings, logger.info)
            self._started_stack = False

    async def _leave(self) -> None:
        for waiting in self._waiting:
            waiting.cancel()

    # --- jobs ------------------------------------------------------------------------------------

    def process(
        self,
        instance: Any,
        sampling_params: Mapping[str, Any],
        job_id: str | None = None,
        *,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Run a job to its end and return its result, also if it failed (`openhands_jobs.result_of`).

        `instance`: a row, or `<dataset>/<instance_id>`. `job_id`: your own id; the same id joins its
        job, also after a restart. `timeout`: seconds to wait; the job continues after it.
        Raises: ServerNotRunning; ConfigurationError and InstanceError for a job that cannot start;
        Cancelled (`stop` was called); TimeoutError.
        """
        perdure = self._connected()
        name = job_id if job_id is not None else str(uuid.uuid4())
        return self._loop.do(self._process(perdure, instance, sampling_params, name, timeout))

    async def _process(
        self,
        perdure: Perdure,
        instance: Any,
        sampling_params: Mapping[str, Any],
        job_id: str,
        timeout: float | None,
    ) -> dict[str, Any]:
        details, record = await self._accepted(instance, sampling_params, job_id)
        handle = await perdure.start_rollout(record.request)
        self._jobs[job_id] = details
        waiting = asyncio.ensure_future(self._finished(perdure, handle, details, record))
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout(timeout):
                return await waiting
        except TimeoutError:
            problem = f"job {job_id!r} is not done after {timeout:g} s; the same id joins it again"
            raise TimeoutError(problem) from None
        except asyncio.CancelledError:
            if self.running:
                raise
            raise Cancelled(f"the server was stopped; job {job_id!r} continues") from None
        finally:
            self._waiting.discard(waiting)
            self._jobs.pop(job_id, None)

    async def _accepted(
        self, instance: Any, sampling_params: Mapping[str, Any], job_id: str
    ) -> tuple[JobDetails, JobRecord]:
        """Check a job and store its record. Raises: ConfigurationError, InstanceError."""
        iterations, llm_config = jobs.split_sampling(sampling_params)
        run_id = jobs.job_run(self._name, job_id)
        ref, trajectory = await self._instance(instance)
        request = jobs.rollout_of(
            self._rollout, run_id=run_id, instance=ref, iterations=iterations, llm_config=llm_config
        )
        record = JobRecord(
            job_id=job_id,
            request=request,
            trajectory_id=trajectory,
            max_iterations=jobs.MAX_ITERATIONS if iterations is None else iterations,
            started_at=time.time(),
        )
        data = record.model_dump_json(indent=1).encode()
        if not await self._store.put_if_absent(store_keys.job(run_id), data):
            known = await self._record(job_id)
            jobs.check_same(known, record)
            record = known
        details = JobDetails(
            job_id=job_id,
            instance=instance,
            max_iterations=record.max_iterations,
            llm_config=llm_config,
            start_time=record.started_at,
        )
        return details, record

    async def _instance(self, instance: Any) -> tuple[str, str | int | None]:
        """The instance's reference and the caller's `trajectory_id`. A row is saved in the catalog."""
        if isinstance(instance, str):
            return instance, None
        row = jobs.row_of(instance)
        trajectory = row.get("trajectory_id")
        if isinstance(row.get("instance"), str):
            return str(row["instance"]), trajectory
        read = jobs.read_instance(row, self._name)
        await instance_catalog.save(self._store, read)
        return read.ref, trajectory

    async def _record(self, job_id: str) -> JobRecord:
        """Raises: NotFound."""
        key = store_keys.job(jobs.job_run(self._name, job_id))
        return jobs.parse_record((await self._store.get(key)).data)

    async def _finished(
        self, perdure: Perdure, handle: RolloutHandle, details: JobDetails, record: JobRecord
    ) -> dict[str, Any]:
        """Wait for the job and return its result. A failed job is complete; its result has the error."""
        ending = asyncio.ensure_future(handle.result())
        episode: Episode | None = None
        uri = ""
        try:
            while not ending.done():
                await self._look(handle, details, record)
                await asyncio.wait([ending], timeout=LOOK_S)
            ref = await ending
            episode, uri = await self._completed(details, ref), ref.uri
        except Cancelled as error:
            details.failed_stage, details.error = RolloutStatus.CANCELLED.value, str(error)
        except NoResult as error:
            details.failed_stage, details.error = "init", str(error)
        finally:
            ending.cancel()
            details.runtime = None
            details.event.set()
        return jobs.result_of(details, record, episode, uri)

    async def _look(self, handle: RolloutHandle, details: JobDetails, record: JobRecord) -> None:
        described = await handle.handle.describe()
        if described.status is not WorkflowExecutionStatus.RUNNING:
            return
        stage, _ = jobs.place_of(described)
        if stage == "init":
            return
        details.config = record.request
        details.start_run_time = details.start_run_time or time.time()
        details.runtime = store_keys.rollout_of(record.request) if stage == "run" else None
        if stage == "eval":
            details.start_eval_time = details.start_eval_time or time.time()

    async def _completed(self, details: JobDetails, ref: EpisodeRef) -> Episode:
        key = ref.uri.removeprefix(f"{self._store.url}/")
        episode = parse_episode(key, (await self._store.get(key)).data)
        patch = b"" if episode.patch is not None else None
        turns = None
        problems: list[str] = []
        if episode.patch is not None and not episode.patch.empty:
            one = episode.patch
            patch = await self._file(one.key, one.sha256, bytes, problems)
        if episode.turns_key is not None:
            read = turns_parquet.decode
            turns = await self._file(episode.turns_key, episode.turns_sha256, read, problems)
        jobs.complete(details, episode, patch, turns or [])
        details.error = details.error or "; ".join(problems)
        return episode

    async def _file(
        self, key: str, sha256: str, read: Callable[[bytes], T], problems: list[str]
    ) -> T | None:
        """A file of an episode. The verdict is valid without it, so errors only go to `problems`."""
        try:
            return read(stored_json.check_file(key, (await self._store.get(key)).data, sha256))
        except NotFound:
            problems.append(f"{key} is gone")
        except ValueError as error:
            problem = str(error).removeprefix(f"{key} is unreadable: ")
            problems.append(f"{key} is unreadable: {problem}")
        return None

    def job_details(self, job_id: str) -> JobDetails:
        """The current details of a job that a call waits for. Raises: NotFound."""
        if job_id not in self._jobs:
            raise NotFound(f"no call waits for job {job_id!r}")
        return self._jobs[job_id]

    def cancel(self, job_id: str) -> bool:
        """Cancel an open job; its caller's result says so. False: the job is unknown or has ended."""
        return self._loop.do(self._cancel(self._connected(), job_id))

    async def _cancel(self, perdure: Perdure, job_id: str) -> bool:
        try:
            record = await self._record(job_id)
            await perdure.rollout(record.request.workflow_id).cancel()
        except NotFound:
            return False
        return True

    def status(self) -> dict[str, int]:
        """Counts of open jobs by stage, including those of earlier servers with this name.

        Example:
            {"init_queue": 2, "run_queue": 0, "eval_queue": 0, "active_init": 1, "active_run": 5,
             "active_eval": 1, "total": 9}
        """
        return self._loop.do(self._status(self._connected()))

    async def _status(self, perdure: Perdure) -> dict[str, int]:
        query = (
            f"WorkflowType = '{temporal_names.ROLLOUT}' AND {attributes.RUN.name} STARTS_WITH "
            f"'{self._name}.' AND ExecutionStatus = 'Running'"
        )
        opened = [one.id async for one in perdure.client.list_workflows(query)]
        handles = (perdure.client.get_workflow_handle(one) for one in opened)
        described = await asyncio.gather(*(one.describe() for one in handles))
        running = [d for d in described if d.status is WorkflowExecutionStatus.RUNNING]
        places = Counter(jobs.place_of(one) for one in running)
        queued = {f"{stage}_queue": places[stage, False] for stage in ("init", "run", "eval")}
        active = {f"active_{stage}": places[stage, True] for stage in ("init", "run", "eval")}
        return {**queued, **active, "total": len(running)}

    def _connected(self) -> Perdure:
        if self._perdure is None:
            raise ServerNotRunning("the server is not running: call start first")
        return self._perdure

    # --- LLM servers -----------------------------------------------------------------------------

    def add_llm_server(self, address: Address, weight: float = 1.0) -> None:
        """Add an inference server, or change its weight.

        New rollouts go to servers by weight and calls in flight; a dead server gets none. Raises:
        ConfigurationError.
        """
        url, share = (address, weight) if isinstance(address, str) else address
        model = str(self._rollout["model"])
        try:
            self._loop.do(add_engine(self._roster, EngineSpec(url, share), model, default=model))
        except ValueError as error:
            raise ConfigurationError(f"llm_server_addresses: {error}") from error

    def clear_llm_servers(self) -> None:
        """Remove all servers. Open jobs wait until you add the next one."""
        self._loop.do(self._clear())

    async def _clear(self) -> None:
        for engine in (await self._roster.read()).engines:
            if not engine.removed:
                with contextlib.suppress(NotFound):  # another call has removed it
                    await remove_engine(self._roster, engine.name)

    @property
    def needs_llm(self) -> bool:
        """Whether the agent calls a model. We assume that an agent given by dotted path does."""
        agent = str(self._rollout["agent"])
        return ":" in agent or bool(load("agent", AGENTS, agent).needs_model)

    def llm_servers(self) -> list[str]:
        """The URLs of all servers that were added and not removed."""
        known = self._loop.do(self._roster.read()).engines
        return [engine.url for engine in known if not engine.removed]
