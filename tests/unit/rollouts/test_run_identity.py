"""The identity of a run: which fields count, which may change, and what is refused."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from perdure import home_folder
from perdure.client.request_comparison import Identity, differences
from perdure.engines.engine_roster import ModelFormat, StoredRoster, add_engine, roster_key
from perdure.engines.engine_state import EngineSpec
from perdure.engines.reported_model import engine_settings
from perdure.episodes.episode import AttemptSummary, EpisodeParts
from perdure.errors import ConfigurationError, IdentityDiffers, InstanceError
from perdure.instances import instance_catalog
from perdure.rollouts import run_identity
from perdure.rollouts.activity_messages import Attempt, Booted
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.boot_stage import boot, rollout_identity
from perdure.rollouts.run_pages import prepare_run
from perdure.rollouts.run_record import current_request
from perdure.rollouts.stage_services import Services
from perdure.settings.settings_tree import EngineSettings, Settings
from perdure.stack.engine_presence import check_same_engine
from perdure.stack.stack_state import StackState
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.storage.local_store import LocalStore
from perdure.types import (
    Grade,
    Grading,
    GroupRequest,
    Instance,
    Outcome,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    RunRequest,
    Source,
    SourceKind,
)
from tests.stored_episodes import store_episode
from tests.unit.rollouts.one_try import OneTry

RUN: dict[str, Any] = {"run_id": "r", "instances": ("toy/a",)}


class Endpoint(BaseHTTPRequestHandler):
    """A server that lists the models of `served`."""

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
    await store.put(store_keys.instance("toy/a"), b'{"row": 1}')
    return store


async def asked(
    store: LocalStore, tmp_path: Path, url: str = "", setting: str = "", **fields: Any
) -> Identity:
    """The identity of RUN with these fields of its rollouts. `setting`: PERDURE_ENGINE__MODEL."""
    settings = Settings(home=tmp_path / "home", engine=EngineSettings(url=url, model=setting))
    run = RunRequest(**RUN, rollout={"agent": "mini_swe_agent", **fields})
    rollout, engine = run.rollout_request("any/instance"), engine_settings(settings)
    return await run_identity.identity_of(settings, store, rollout, ["toy/a"], engine)


@pytest.mark.parametrize(
    ("named", "told"),
    [
        (("model-a", "model-b"), "--model model-b contradicts the engine's setting.*model-a"),
        (("", "model-b"), "serves no model model-b: set --model .*model-a"),
        (("model-b", "policy"), "serves no model model-b: set PERDURE_ENGINE__MODEL .*model-a"),
    ],
)
async def test_a_model_that_would_not_answer_is_refused(
    store: LocalStore, tmp_path: Path, endpoint: str, named: tuple[str, str], told: str
) -> None:
    """The check runs before anything boots: a run must not carry the name of a model that it never
    called."""
    setting, model = named
    with pytest.raises(ConfigurationError, match=told):
        await asked(store, tmp_path, endpoint, setting, model=model)


@pytest.mark.parametrize(
    ("setting", "model"),
    [("", "policy"), ("", "org/model-a"), ("model-a", "/weights/1"), ("", "model-a-2026-01-01")],
)
async def test_another_name_of_the_served_model_is_no_contradiction(
    store: LocalStore, tmp_path: Path, endpoint: str, setting: str, model: str
) -> None:
    """No name, the model's owner, its folder or a dated name is accepted, because turns record the
    model that answers."""
    assert (await asked(store, tmp_path, endpoint, setting, model=model))["engine.model"]


async def test_the_same_question_is_the_same_run(
    store: LocalStore, tmp_path: Path, endpoint: str
) -> None:
    """It is joined, even if the endpoint has moved or cannot be asked."""
    first = await asked(store, tmp_path, endpoint)
    await run_identity.keep(store, "r", first)

    await run_identity.check(store, "r", await asked(store, tmp_path, endpoint))
    await run_identity.check(store, "r", await asked(store, tmp_path, "http://127.0.0.1:9/v1"))
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
        ({"policy_version": 3}, r"policy_version: null -> 3"),
    ],
)
async def test_another_question_is_refused(
    store: LocalStore, tmp_path: Path, fields: dict[str, Any], line: str
) -> None:
    """The message lists the differences, old and new, and says how to start another run."""
    await run_identity.keep(
        store, "r", await asked(store, tmp_path, agent_options={"step_limit": 2})
    )
    now = {"agent_options": {"step_limit": 2}, **fields}

    with pytest.raises(ConfigurationError, match=rf"(?s){line}.*use --new or another"):
        await run_identity.check(store, "r", await asked(store, tmp_path, **now))


async def test_another_model_behind_the_address_is_refused(
    store: LocalStore, tmp_path: Path, endpoint: str
) -> None:
    """The identity has what the endpoint says it serves, not its address."""
    await run_identity.keep(store, "r", await asked(store, tmp_path, endpoint))
    Endpoint.served = [{"id": "model-b", "root": "/weights/1"}]

    with pytest.raises(ConfigurationError, match=r"engine.model: model-a -> model-b"):
        await run_identity.check(store, "r", await asked(store, tmp_path, endpoint))


async def test_a_changed_row_is_refused(store: LocalStore, tmp_path: Path) -> None:
    """The row's content counts, not its name."""
    await run_identity.keep(store, "r", await asked(store, tmp_path))
    await store.put(store_keys.instance("toy/a"), b'{"row": 2}')

    with pytest.raises(ConfigurationError, match=r"instance.toy/a: [0-9a-f]{16} -> [0-9a-f]{16}"):
        await run_identity.check(store, "r", await asked(store, tmp_path))


async def test_a_start_by_any_program_is_compared(store: LocalStore, tmp_path: Path) -> None:
    """The first activity stores the identity and refuses another one, whichever program starts the
    run."""
    settings = Settings(home=tmp_path / "home", store=store.url)
    home_folder.keep_private(settings)
    services = Services(settings)
    asks = RunRequest(**RUN, rollout={"agent": "nop", "sandbox": "bubblewrap"})
    changed = asks.model_copy(update={"rollout": {**asks.rollout, "verdict": "official"}})

    assert (await prepare_run(services, asks)).total == 1
    assert (await prepare_run(services, asks)).total == 1
    with pytest.raises(ConfigurationError, match=r'verdict: "verified" -> "official"'):
        await prepare_run(services, changed)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_later_start_adds_instances_in_their_order(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """Those that the run has come first, also if a try is killed before it has recorded the others. A
    start that leaves one out is refused."""
    settings = Settings(home=tmp_path / "home", store=store.url)
    home_folder.keep_private(settings)
    services = Services(settings)
    for name in ("b", "a0"):
        await store.put(store_keys.instance(f"toy/{name}"), b"{}")
    shared = {"run_id": "r", "rollout": {"agent": "nop", "sandbox": "bubblewrap"}}
    first = RunRequest(**shared, instances=("toy/b",))
    more = RunRequest(**shared, instances=("toy/a0", "toy/b"))
    await prepare_run(services, first)
    if is_killed:

        async def killed(*_: Any) -> None:
            raise RuntimeError

        with monkeypatch.context() as patched:
            patched.setattr(run_identity, "add_instances", killed)
            with pytest.raises(RuntimeError):
                await prepare_run(services, more)

    for _ in range(2):
        assert (await prepare_run(services, more)).total == 2
    assert json.loads((await store.get(store_keys.run_instances("r"))).data) == ["toy/b", "toy/a0"]
    assert (await current_request(store, "r")).instances == more.instances
    with pytest.raises(ConfigurationError, match=r"instance.toy/a0: left out"):
        await prepare_run(services, first)


def rollout(**fields: Any) -> RolloutRequest:
    return RolloutRequest.model_validate(
        {"run_id": "r", "instance": "toy/a", "agent": "oracle", "sandbox": "local", **fields}
    )


async def graded(services: Services, request: RolloutRequest) -> None:
    """A rollout whose verdict is in the store."""
    now = await run_identity.identity_of(services.settings, services.store, request, ["toy/a"], {})
    await run_identity.keep_rollout(services.store, request, "first", now)
    grade = Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=1.0))
    parts = EpisodeParts(
        request=request,
        status=RolloutStatus.GRADED,
        started_at=0,
        finished_at=1,
        attempts=[AttemptSummary(attempt=1)],
        grade=grade,
    )
    await store_episode(services.store, parts)
    for name in ("patch.json", "agent.json"):
        await services.store.put(f"{store_keys.attempt(request, 1)}/{name}", b"{}")


async def booted(services: Services, request: RolloutRequest, play: str = "later") -> Booted:
    """Start it like a workflow that Temporal does not know."""
    return await boot(await Job.of(services, Attempt(request=request, attempt=1), OneTry(play)))


def row(problem: str) -> Instance:
    return Instance(
        instance_id="a",
        dataset="toy",
        problem_statement=problem,
        source=Source(kind=SourceKind.BLOB, key="blobs/x"),
        grading=Grading(test_cmd="pytest"),
    )


@pytest.fixture
async def services(tmp_path: Path) -> Services:
    store = LocalStore(tmp_path / "store")
    await instance_catalog.save(store, row("a problem"))
    return Services(
        Settings(home=tmp_path / "home", store=store.url, sandbox={"allow_local": True})
    )


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"agent": "nop"}, 'agent: "oracle" -> "nop"'),
        ({"policy_version": 9, "max_staleness": 0}, "policy_version: null -> 9"),
        ({"sampling": {"top_k": 5}}, "sampling.top_k: -1 -> 5"),
        ({"agent": "nop", "start_at": "grade"}, 'agent: "oracle" -> "nop"'),
    ],
)
async def test_a_stored_episode_answers_no_other_request(
    services: Services, fields: dict[str, Any], line: str
) -> None:
    """It is refused even if only the store knows the rollout, and the message has old, new and the
    fix."""
    await graded(services, rollout())

    with pytest.raises(IdentityDiffers, match=rf"(?s)rollout r/a/0 .*{line}.*another run_id"):
        await booted(services, rollout(**fields))


async def test_a_stored_episode_answers_no_request_for_another_row(services: Services) -> None:
    """The row's content counts, but a regrade of the captured patch may use a corrected row."""
    await graded(services, rollout())
    await instance_catalog.save(services.store, row("another problem"))

    with pytest.raises(IdentityDiffers, match=r"instance.toy/a: [0-9a-f]{16} -> [0-9a-f]{16}"):
        await booted(services, rollout())
    assert (await booted(services, rollout(start_at="grade", round=1))).attempt == 1


async def test_a_stored_episode_answers_the_same_request(services: Services) -> None:
    """When a rollout expires and how it is watched are not part of its identity."""
    await graded(services, rollout())

    found = await booted(services, rollout(expires_at=1.0, heartbeat_timeout_s=60))

    assert found.done is not None
    assert found.done.reward == 1.0


async def test_a_new_rollout_becomes_what_its_first_request_asks(services: Services) -> None:
    """Before a rollout has begun, nothing is refused. After that, another request is."""
    begun = rollout(start_at="grade", agent="oracle")
    with pytest.raises(InstanceError, match="no captured patch"):  # it got as far as its patch
        await booted(services, begun)
    for name in ("patch.json", "agent.json"):
        await services.store.put(f"{store_keys.attempt(begun, 1)}/{name}", b"{}")

    assert (await booted(services, begun)).attempt == 1
    with pytest.raises(IdentityDiffers, match='agent: "oracle" -> "nop"'):
        await booted(services, rollout(agent="nop"), play="another")


async def test_a_rollout_is_not_compared_with_itself(services: Services) -> None:
    """A row that is imported again during a rollout does not stop its further attempts."""
    await graded(services, rollout())
    await instance_catalog.save(services.store, row("another problem"))

    assert (await booted(services, rollout(), play="first")).done is not None


async def test_another_model_answers_for_no_rollout(
    services: Services, tmp_path: Path, endpoint: str
) -> None:
    """The identity of a rollout without a policy version includes what its endpoint says it
    serves."""
    request = rollout(agent="mini_swe_agent")

    async def asked_now() -> Identity:
        engine = {"url": endpoint, "kind": "auto"}
        store = services.store.url
        asking = Services(Settings(home=tmp_path / "home", store=store, engine=engine))
        job = await Job.of(asking, Attempt(request=request, attempt=1), OneTry("play"))
        return await rollout_identity(job)

    before = await asked_now()
    Endpoint.served = [{"id": "model-b", "root": "/weights/1"}]

    assert differences(before, await asked_now()) == ["engine.model: model-a -> model-b"]


async def test_a_rollout_is_the_model_that_it_names_among_many(
    services: Services, tmp_path: Path, endpoint: str
) -> None:
    """The rollout is identified by the model that it names, even if the endpoint lists another
    model first."""
    engine = {"url": endpoint, "kind": "auto"}
    found = []
    for served in (["model-a", "model-c"], ["model-c", "model-a"]):
        Endpoint.served = [{"id": name} for name in served]
        asking = Services(Settings(home=tmp_path / "home", engine=engine))
        found.append(await asking.reported_engine("model-a"))

    assert found[0]["engine.model"] == "model-a"
    assert found[0] == found[1]


@pytest.mark.parametrize("model", ["policy", "model-a"])
@pytest.mark.parametrize("lists_both", [True, False])
async def test_an_engine_that_is_started_again_is_the_same_model(
    services: Services, tmp_path: Path, endpoint: str, model: str, lists_both: bool
) -> None:
    """The served name contains the number of the start, and SGLang lists no other name."""
    engine, found = {"url": endpoint, "kind": "auto"}, []
    for start in (1, 2):
        names = [f"{model}-g{start}", *([model] if lists_both else [])]
        Endpoint.served = [{"id": name, "root": "/weights/1"} for name in names]
        asking = Services(Settings(home=tmp_path / "home", engine=engine))
        found.append(await asking.reported_engine(model))

    assert found[0] == found[1]
    assert (found[0]["engine.model"], found[0]["engine.root"]) == (model, "/weights/1")


async def add_judge(settings: Settings, store: Store) -> None:
    roster = StoredRoster(store, roster_key(home_folder.load_secret(settings)))
    judge = ModelFormat(tokenizer="/judge")
    await add_engine(roster, EngineSpec("http://h:1"), "judge", model_format=judge, run="r*")


async def test_an_added_model_identifies_the_run_that_names_it(
    store: LocalStore, tmp_path: Path, endpoint: str
) -> None:
    """The settings' engine is not asked about it."""
    await add_judge(Settings(home=tmp_path / "home"), store)
    found = await asked(store, tmp_path, endpoint, model="judge")

    assert (found["engine.model"], found["engine.tokenizer"]) == ("judge", "/judge")


async def test_a_rollout_of_a_policy_version_is_identified_by_its_tokenizer(
    services: Services,
) -> None:
    """A training updates the model's weights, but ids of another tokenizer stand for other texts."""
    await add_judge(services.settings, services.store)
    asked = {"agent": "mini_swe_agent", "model": "judge", "policy_version": 3, "max_staleness": 0}
    job = await Job.of(services, Attempt(request=rollout(**asked), attempt=1), OneTry("play"))
    found = await rollout_identity(job)

    assert found["engine.tokenizer"] == "/judge"
    assert "engine.model" not in found


@pytest.mark.parametrize(
    "fields", [{"model": "jugde"}, {"model": "judge", "models": {"small-*": "jugde"}}]
)
async def test_a_model_that_no_engine_has_is_refused_before_a_sandbox_boots(
    services: Services, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's first activity refuses it, and so does the boot of a single rollout. The message
    lists the models that are available to this run."""
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    await add_judge(services.settings, services.store)
    named = {"agent": "mini_swe_agent", "sandbox": "local", **fields}
    told = "no engine has the model jugde: the engines have judge"

    with pytest.raises(ConfigurationError, match=told):
        await prepare_run(services, RunRequest(**RUN, rollout=named))
    with pytest.raises(ConfigurationError, match=told):
        await booted(services, rollout(**named))
    with pytest.raises(ConfigurationError, match="jugde: the engines have none"):
        await booted(services, rollout(**named | {"run_id": "other", "model": "jugde"}))


def test_a_group_numbers_its_samples() -> None:
    """A sample index in the template is refused by name, not ignored."""
    with pytest.raises(
        ConfigurationError, match=r"'rollout.sample_index' is set by the group itself"
    ):
        GroupRequest(rollout=rollout(sample_index=2), n_samples=2)


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
    """URL, tokenizer and model of the command are not ignored, and the message names the fix."""
    running = state("http://a", url="http://a", kind="auto", model="", tokenizer="qwen3")
    settings = Settings(engine=EngineSettings(**{"url": "http://a", **engine}))

    with pytest.raises(ConfigurationError, match=rf"{message}.*To use the new ones, run"):
        check_same_engine(settings, running)


@pytest.mark.parametrize("engine", ["http://a", "scripted:policy.jsonl"])
def test_a_command_that_asks_for_no_engine_uses_the_stacks(engine: str) -> None:
    """This covers a new shell without the variables, and a scripted policy that was given by
    name."""
    running = state(engine, url=engine, kind="openai", model="m", tokenizer="t")

    check_same_engine(Settings(), running)


def test_an_option_of_the_agent_that_one_side_lacks_is_a_difference() -> None:
    """A stored episode of an agent without the option is not reused for an agent with it."""
    without: Identity = {}
    limited: Identity = {"agent_options.step_limit": "5"}

    assert differences(without, limited) == ["agent_options.step_limit: absent -> 5"]
    assert differences(limited, without) == ["agent_options.step_limit: 5 -> absent"]
