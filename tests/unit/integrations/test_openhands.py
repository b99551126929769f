"""Document 003's server: what its jobs become, its LLM servers, and its HTTP verbs."""

import hashlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perdure.episodes.episode_store import read_episode
from perdure.errors import Cancelled, ConfigurationError, InstanceError
from perdure.integrations import openhands_http, openhands_jobs
from perdure.integrations.openhands import OpenHandsServer, ServerNotRunning
from perdure.integrations.openhands_jobs import JobDetails
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys, stored_json
from perdure.storage.local_store import LocalStore
from tests import docs_pages
from tests.store_with_runs import write_rollout
from tests.unit.instances.test_rows import ROW


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", store=str(tmp_path / "store"))


# --- jobs ------------------------------------------------------------------------------------


def test_iterations_are_taken_from_a_copy() -> None:
    """`max_iterations` is popped, and the caller's mapping stays as it is."""
    given = {"max_iterations": 30, "temperature": 0.5}

    assert openhands_jobs.split_sampling(given) == (30, {"temperature": 0.5})
    assert given == {"max_iterations": 30, "temperature": 0.5}


@pytest.mark.parametrize(
    ("agent", "iterations", "options"),
    [
        ("mini_swe_agent", 30, {"step_limit": 30}),
        ("openhands", None, {"max_steps": 2}),
        ("claude_code", 5, {"max_turns": 5}),
        ("codex", None, {}),
    ],
)
def test_iterations_are_the_agents_own_limit(
    agent: str, iterations: int | None, options: dict[str, int]
) -> None:
    """Two by default, as documented, where the agent counts them at all."""
    request = openhands_jobs.rollout_of(
        {"agent": agent}, run_id="r", instance="d/i", iterations=iterations, llm_config={}
    )

    assert request.agent_options == options


def test_a_limit_that_the_agent_lacks_is_refused() -> None:
    """A limit is never dropped without a word."""
    with pytest.raises(ConfigurationError, match="agent codex has no such limit"):
        openhands_jobs.rollout_of(
            {"agent": "codex"}, run_id="r", instance="d/i", iterations=9, llm_config={}
        )


def test_a_misspelt_sampling_parameter_is_refused() -> None:
    """The message names it and the nearest name."""
    with pytest.raises(ConfigurationError, match=r"'temprature'.*'temperature'"):
        openhands_jobs.rollout_of(
            {}, run_id="r", instance="d/i", iterations=None, llm_config={"temprature": 1}
        )


def test_the_llm_config_samples() -> None:
    """What is left of the sampling parameters is the rollout's sampling."""
    request = openhands_jobs.rollout_of(
        {"agent": "codex", "sampling": {"top_p": 0.9}},
        run_id="r",
        instance="d/i",
        iterations=None,
        llm_config={"temperature": 0.3, "max_output_tokens": 64, "api_key": "mykey"},
    )

    assert (request.sampling.temperature, request.sampling.top_p) == (0.3, 0.9)
    assert request.sampling.max_tokens_per_turn == 64


def test_a_row_without_a_data_source_is_of_swebench() -> None:
    """The documented default; another one chooses its handler."""
    assert openhands_jobs.read_instance(ROW, "jobs").data_source == "swebench"


def test_an_unknown_data_source_is_named() -> None:
    """The error is raised before a job exists."""
    with pytest.raises(ConfigurationError, match="'swebenhc': did you mean"):
        openhands_jobs.read_instance({**ROW, "data_source": "swebenhc"}, "jobs")


def test_a_bad_row_is_refused_by_field() -> None:
    """Before anything boots."""
    with pytest.raises(InstanceError, match="problem_statement"):
        openhands_jobs.read_instance({**ROW, "problem_statement": None}, "jobs")


def test_a_series_is_a_row() -> None:
    """A pandas Series has `to_dict`; anything else is refused."""

    class Series:
        def to_dict(self) -> Mapping[str, Any]:
            return ROW

    assert openhands_jobs.row_of(Series()) is ROW
    with pytest.raises(ConfigurationError, match="must be a row"):
        openhands_jobs.row_of(7)


def test_each_job_id_has_its_own_run() -> None:
    """Ids that are no slugs stay apart; an empty one is refused."""
    runs = {openhands_jobs.job_run("s", one) for one in ("a", "a/b", "a-b", "a b", "x" * 300)}

    assert len(runs) == 5
    assert max(map(len, runs)) < 128
    with pytest.raises(ConfigurationError, match="job_id"):
        openhands_jobs.job_run("s", "")


# --- the server ------------------------------------------------------------------------------


def test_skip_eval_is_a_bool(settings: Settings) -> None:
    """The text "False" is not true."""
    with pytest.raises(ConfigurationError, match="allow_skip_eval"):
        OpenHandsServer(allow_skip_eval="False", settings=settings)  # type: ignore[arg-type]  # as a shell passes it
    parsed = [openhands_http.arguments(["--allow-skip-eval", word]) for word in ("False", "true")]

    assert [one.allow_skip_eval for one in parsed] == [False, True]


def test_workers_of_each_stage_are_slots(settings: Settings) -> None:
    """Evaluation has as many as runs, unless it is told."""
    slots = OpenHandsServer(max_init_workers=3, max_run_workers=4, settings=settings).slots
    own = OpenHandsServer(max_eval_workers=2, settings=settings).slots

    assert (slots.boot, slots.agent, slots.grade) == (3, 4, 4)
    assert (own.boot, own.agent, own.grade) == (6, 5, 2)


def test_llm_servers_are_added_with_weights_and_cleared(settings: Settings) -> None:
    """The pool leases by weight and by calls in flight; one that is added again is one."""
    server = OpenHandsServer(settings=settings)
    server.add_llm_server("http://a:8000/v1")
    server.add_llm_server("http://b:8000/v1", 3.0)
    server.add_llm_server("http://a:8000/v1", 2.0)
    before = server.llm_servers()
    server.clear_llm_servers()
    server.clear_llm_servers()

    assert before == ["http://a:8000", "http://b:8000"]
    assert server.llm_servers() == []
    with pytest.raises(ConfigurationError, match="not an http"):
        server.add_llm_server("b:8000")


def test_a_server_that_is_not_running_takes_no_job(settings: Settings) -> None:
    """Neither before `start` nor after `stop`, which may be repeated."""
    server = OpenHandsServer(settings=settings)
    server.stop()
    with pytest.raises(ServerNotRunning, match="call start first"):
        server.process("d/i", {})


@pytest.mark.parametrize("name", ["patch.diff", "turns.parquet"])
@pytest.mark.parametrize("how", ["changed", "gone"])
async def test_a_damaged_file_is_no_part_of_a_result(
    settings: Settings, name: str, how: str
) -> None:
    """The verdict stays, and `error` names the file."""
    server = OpenHandsServer(settings=settings)
    store = LocalStore(Path(settings.store))
    request = await write_rollout(store, resolved=True)
    key = f"{store_keys.attempt(request, 1)}/{name}"
    data = (await store.get(key)).data
    episode = await read_episode(store, request)
    assert episode is not None
    if name == "turns.parquet":
        whole = episode.model_copy(update={"turns_sha256": hashlib.sha256(data).hexdigest()})
        await store.put(episode.key, stored_json.encode(whole))
    if how == "gone":
        await store.delete(key)
    else:
        await store.put(key, bytes([*data[:9], data[9] ^ 1, *data[10:]]))
    details = JobDetails("a", None, 2, {}, 0.0)
    await server._completed(details, episode.ref(store.url))

    assert details.eval_results is not None
    assert details.run_results is not None
    assert details.eval_results["resolved"]
    found = (details.run_results["git_patch"] is None, details.run_results["messages"] == [])
    assert found == (name == "patch.diff", name == "turns.parquet")
    told = "gone" if how == "gone" else "unreadable: its sha256 differs"
    assert details.error == f"{key} is {told}"


# --- verbs -----------------------------------------------------------------------------------


class Recorded:
    """A server that notes its calls."""

    running = True
    needs_llm = True

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.addresses: list[str] = []
        self.error: Exception | None = None

    def start(self) -> None:
        self.calls.append(("start",))

    def stop(self) -> None:
        self.calls.append(("stop",))

    def status(self) -> dict[str, int]:
        return {"active_run": 2, "total": 2}

    def process(self, instance: Any, sampling: Any, job_id: str | None, *, timeout: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.calls.append(("process", instance, sampling, job_id, timeout))
        return {"job_id": job_id, "resolved": True}

    def cancel(self, job_id: str) -> bool:
        return job_id == "known"

    def add_llm_server(self, address: str, weight: float) -> None:
        self.addresses.append(f"{address}={weight:g}")

    def clear_llm_servers(self) -> None:
        self.addresses.clear()

    def llm_servers(self) -> list[str]:
        return self.addresses


class Http:
    """Calls of a user."""

    def __init__(self, server: Recorded, url: str) -> None:
        self.server = server
        self.url = url

    def call(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        data = json.dumps(body or {}).encode() if method == "POST" else None
        request = urllib.request.Request(f"{self.url}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)


@contextmanager
def listening() -> Iterator[Http]:
    server = Recorded()
    verbs = openhands_http.Verbs(server, timeout=9.0)  # type: ignore[arg-type]  # it has the same face
    with openhands_http.http_server(verbs, "127.0.0.1", 0) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Http(server, f"http://127.0.0.1:{http.server_address[1]}")
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture
def http() -> Iterator[Http]:
    with listening() as found:
        yield found


def test_the_verbs_of_its_repository(http: Http) -> None:
    """Each answers as users of the repository know it."""
    said = [
        http.call("/clear_llm_server"),
        http.call("/add_llm_server", {"address": "http://a:8000/v1"}),
        http.call("/start"),
        http.call("/status", method="GET"),
        http.call("/process", {"instance": {"instance_id": "i"}, "sampling_params": {"a": 1}}),
        http.call("/process", {"instance": {"instance_id": "i"}, "job_id": "mine"}),
        http.call("/cancel", {"job_id": "known"}),
        http.call("/stop"),
    ]

    assert [status for status, _ in said] == [200] * 8
    assert said[1][1] == {"status": "Added LLM server address: http://a:8000/v1"}
    assert said[3][1] == {"status": "running", "pending_jobs": 2, "active_run": 2, "total": 2}
    assert said[6][1] == {"status": "Cancel requested for job known"}
    assert http.server.calls == [
        ("start",),
        ("process", {"instance_id": "i"}, {"a": 1}, None, 9.0),
        ("process", {"instance_id": "i"}, {}, "mine", 9.0),
        ("stop",),
    ]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigurationError("data_source"), 400),
        (InstanceError("row 1"), 400),
        (ServerNotRunning("stopped"), 503),
        (Cancelled("stopped"), 503),
        (TimeoutError("late"), 504),
        (RuntimeError("a bug"), 500),
    ],
)
def test_errors_have_a_status_and_a_reason(error: Exception, status: int, http: Http) -> None:
    """What a client can correct is told from what it can repeat."""
    http.server.add_llm_server("http://a", 1.0)
    http.server.error = error

    assert http.call("/process", {"instance": {"instance_id": "i"}}) == (
        status,
        {"detail": str(error)},
    )


@pytest.mark.parametrize(
    ("path", "body", "status", "detail"),
    [
        ("/process", {"instance": {"instance_id": "i"}}, 503, "no LLM server"),
        ("/process", {}, 400, "instance is missing"),
        ("/cancel", {"job_id": "never"}, 404, "no open job 'never'"),
        ("/process", [1], 400, "must be a JSON object"),
        ("/nothing", {}, 404, "no route"),
    ],
)
def test_a_wrong_call_is_told(path: str, body: Any, status: int, detail: str, http: Http) -> None:
    """The detail names what is wrong."""
    found, said = http.call(path, body)

    assert (found, detail in said["detail"]) == (status, True)


def test_the_docs_show_the_server(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block that train.md prints names what the server takes."""
    processed: list[tuple[Any, ...]] = []

    class Shown(OpenHandsServer):
        def start(self) -> None:
            processed.append(tuple(self.llm_servers()))

        def process(self, instance: Any, sampling_params: Any, job_id: Any = None, **_: Any) -> Any:
            processed.append((instance, sampling_params, job_id))

    shown = partial(Shown, settings=settings)
    monkeypatch.setattr("perdure.integrations.openhands.OpenHandsServer", shown)
    exec(docs_pages.block("train.md", "python openhands"), {"row": ROW})

    assert processed == [(), (ROW, {"temperature": 0.8, "max_iterations": 30}, "step-3-7")]
