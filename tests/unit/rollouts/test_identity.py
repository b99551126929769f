"""A run is what it was asked to be: what counts, what may change, what is refused."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from perdure import home
from perdure.client.asked import Identity
from perdure.engines.reported import engine_settings
from perdure.errors import ConfigurationError
from perdure.rollouts import identity
from perdure.rollouts.runs import prepare_run
from perdure.rollouts.services import Services
from perdure.settings.tree import EngineSettings, Settings
from perdure.stack.engines import check_same_engine
from perdure.stack.state import StackState
from perdure.storage import keys
from perdure.storage.local import LocalStore
from perdure.types import RunRequest

RUN: dict[str, Any] = {"run_id": "r", "instances": ("toy/a",)}


class Endpoint(BaseHTTPRequestHandler):
    """Lists the models of `served`."""

    served: list[dict[str, str]]

    def do_GET(self) -> None:
        body = json.dumps({"data": self.served}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    Endpoint.served = [{"id": "model-a", "root": "/weights/1"}]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


@pytest.fixture
async def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    await store.put(keys.instance("toy/a"), b'{"row": 1}')
    return store


async def asked(store: LocalStore, tmp_path: Path, url: str = "", **fields: Any) -> Identity:
    """The identity of RUN with these fields of its rollouts."""
    settings = Settings(home=tmp_path / "home", engine=EngineSettings(url=url))
    run = RunRequest(**RUN, rollout={"agent": "mini_swe_agent", **fields})
    engine = engine_settings(settings)
    return await identity.identity_of(settings, store, run, ["toy/a"], engine)


async def test_the_same_question_is_the_same_run(
    store: LocalStore, tmp_path: Path, endpoint: str
) -> None:
    """It is joined, also when the endpoint has moved or cannot be asked."""
    first = await asked(store, tmp_path, endpoint)
    await identity.keep(store, "r", first)

    await identity.check(store, "r", await asked(store, tmp_path, endpoint))
    await identity.check(store, "r", await asked(store, tmp_path, "http://127.0.0.1:9/v1"))
    assert (first["engine.model"], first["engine.root"]) == ("model-a", "/weights/1")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"sampling": {"temperature": 0.5}}, r"sampling.temperature: 1.0 -> 0.5"),
        ({"agent": "nop"}, r'agent: "mini_swe_agent" -> "nop"'),
        ({"agent_options": {"step_limit": 3}}, r"agent_options.step_limit"),
        ({"sandbox": "podman"}, r'sandbox: "bubblewrap" -> "podman"'),
        ({"limits": {"memory_mb": 512}}, r"limits.memory_mb: \d+ -> 512"),
        ({"verdict": "official"}, r'verdict: "verified" -> "official"'),
        ({"model": "other"}, r'model: "policy" -> "other"'),
    ],
)
async def test_another_question_is_refused(
    store: LocalStore, tmp_path: Path, fields: dict[str, Any], line: str
) -> None:
    """The message says what differs, old and new, and how to start another run."""
    await identity.keep(store, "r", await asked(store, tmp_path, agent_options={"step_limit": 2}))
    now = {"agent_options": {"step_limit": 2}, **fields}

    with pytest.raises(ConfigurationError, match=rf"(?s){line}.*--new starts another run"):
        await identity.check(store, "r", await asked(store, tmp_path, **now))


async def test_another_model_behind_the_address_is_refused(
    store: LocalStore, tmp_path: Path, endpoint: str
) -> None:
    """The endpoint says what it serves; the address tells nothing."""
    await identity.keep(store, "r", await asked(store, tmp_path, endpoint))
    Endpoint.served = [{"id": "model-b", "root": "/weights/1"}]

    with pytest.raises(ConfigurationError, match=r"engine.model: model-a -> model-b"):
        await identity.check(store, "r", await asked(store, tmp_path, endpoint))


async def test_a_changed_row_is_refused(store: LocalStore, tmp_path: Path) -> None:
    """Its content counts, not its name."""
    await identity.keep(store, "r", await asked(store, tmp_path))
    await store.put(keys.instance("toy/a"), b'{"row": 2}')

    with pytest.raises(ConfigurationError, match=r"instance.toy/a: [0-9a-f]{16} -> [0-9a-f]{16}"):
        await identity.check(store, "r", await asked(store, tmp_path))


async def test_policy_versions_are_the_trainers_business(store: LocalStore, tmp_path: Path) -> None:
    """The next version of the weights is the same run."""
    first = await asked(store, tmp_path, policy_version=3, max_staleness=1)

    assert first == await asked(store, tmp_path, policy_version=4, max_staleness=0)


async def test_a_start_by_any_program_is_compared(store: LocalStore, tmp_path: Path) -> None:
    """The first activity keeps the identity and refuses another one, whoever starts the run."""
    settings = Settings(home=tmp_path / "home", store=store.url)
    home.keep_private(settings)
    services = Services(settings)
    asks = RunRequest(**RUN, rollout={"agent": "nop", "sandbox": "bubblewrap"})
    changed = asks.model_copy(update={"rollout": {**asks.rollout, "verdict": "official"}})

    assert (await prepare_run(services, asks)).total == 1
    assert (await prepare_run(services, asks)).total == 1
    with pytest.raises(ConfigurationError, match=r'verdict: "verified" -> "official"'):
        await prepare_run(services, changed)


def state(engine: str, **settings: str) -> StackState:
    return StackState(
        "ready", 1, 1, "t", "default", "", "http://gateway", engine, engine_settings=settings
    )


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"url": "http://b"}, r"url 'http://a', now 'http://b'"),
        ({"tokenizer": "nosuch/model"}, r"tokenizer 'qwen3', now 'nosuch/model'"),
        ({"model": "m"}, r"model 'none', now 'm'"),
    ],
)
def test_a_stack_with_another_engine_is_not_used(engine: dict[str, str], message: str) -> None:
    """Neither URL, tokenizer nor model of this command is ignored; the fix is named."""
    running = state("http://a", url="http://a", kind="auto", model="", tokenizer="qwen3")
    settings = Settings(engine=EngineSettings(**{"url": "http://a", **engine}))

    with pytest.raises(ConfigurationError, match=rf"{message}.*`perdure down`, then the same"):
        check_same_engine(settings, running)


@pytest.mark.parametrize("engine", ["http://a", "scripted:policy.jsonl"])
def test_a_command_that_asks_for_no_engine_uses_the_stacks(engine: str) -> None:
    """A new shell without the variables; and a scripted policy, which was given by name."""
    running = state(engine, url=engine, kind="openai", model="m", tokenizer="t")

    check_same_engine(Settings(), running)
