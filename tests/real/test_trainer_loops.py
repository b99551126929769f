"""Trainers' own packages and loops over Perdure's entry points, on a real stack, without a GPU.

Run by `make test-trainers`. Real Temporal, gateway, workers and sandboxes; scripted engines.
"""

import json
import re
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from perdure.engines.health_check import CANARY_PROMPTS
from perdure.episodes.episode_store import read_run, read_segments
from perdure.stack.engine_presence import home_roster
from perdure.testing.scripted_engine import Call, ScriptedEngine
from tests import docs_pages, loop_agent
from tests.checkout_paths import ROOT
from tests.doubles.scripted_sglang import ScriptedSglang
from tests.doubles.trl_server import UPDATE, TrlServer
from tests.real import trainers_here
from tests.stack.gated_engine import IDLE, TURNS, commands
from tests.stack.host_requirements import why_not_here
from tests.stack.made_instances import INSTANCE
from tests.stack.running_stack import running

pytestmark = [pytest.mark.temporal, pytest.mark.asyncio(loop_scope="module")]

IDLES = {
    "default": {
        "turns": [
            *(
                {
                    "content": "",
                    "tool_calls": [{"name": "bash", "arguments": {"command": command}}],
                }
                for command in commands(fix=IDLE)
            ),
            {"content": loop_agent.DONE},
        ]
    }
}


@pytest.fixture(scope="module", autouse=True)
def _trainers() -> None:
    if reason := why_not_here():
        pytest.skip(reason)
    trainers_here.install()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def done(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Any]]:
    """What each trainer's program printed, and what the engine behind the trainer's client
    `sampled` for it.

    The stack's only engines are those that a trainer registers, so the trainers run one after the
    other.
    """
    folder = tmp_path_factory.mktemp("trainers")
    found: dict[str, Any] = {}
    async with (
        running(folder / "stack", named=False) as stack,
        ScriptedSglang(stack.engine) as router,
    ):
        said = trainers_here.environment(stack)
        for name, command in _programs(folder, stack.engine.url, router.url).items():
            stack.engine.forget()
            found[name] = await trainers_here.run(*map(str, command), **said)
            found[name]["sampled"] = _sampled(stack.engine.calls)
            roster = await home_roster(stack.settings).read()
            found[name]["engines"] = [one.of_trainer for one in roster.engines]
    yield found


def _programs(folder: Path, engine: str, router: str) -> dict[str, tuple[Any, ...]]:
    """By name. `engine`, `router`: the URLs of the vLLM and the SGLang router below the trainers' clients."""
    loops = docs_pages.block("train.md", "yaml").replace("mini_swe_agent", loop_agent.NAME)
    programs: dict[str, tuple[Any, ...]] = {}
    for client in ("LLMServerClient", "FullyAsyncLLMServerClient"):
        file = folder / f"{client}.yaml"
        file.write_text(loops.replace("try-1", client))
        programs[client] = ("verl_worker.py", file, client, engine)
    programs["skyrl"] = ("skyrl_generator.py", engine)
    skyrl = docs_pages.block("train.md", "python skyrl").replace("mini_swe_agent", loop_agent.NAME)
    for form in ("true", "false"):
        home = folder / f"step-wise-{form}"
        home.mkdir()
        (home / "page.py").write_text(skyrl.replace("try-1", f"step-wise-{form}"))
        programs[f"skyrl, step-wise {form}"] = ("skyrl_main.py", home, form, engine)
    if trainers_here.SLIME.exists():
        programs["slime"] = ("slime_rollouts.py", router.rpartition(":")[2])
    # The last one, because the server that it names is in the roster while that server lives.
    (folder / "perdure_env.py").write_text(docs_pages.block("train.md", "python verifiers"))
    programs["verifiers"] = ("verifiers_episodes.py", folder, engine)
    return programs


def _sampled(calls: Iterable[Call]) -> dict[tuple[int, ...], list[float]]:
    """Logprobs by tokens: all that the engine gave one session. Equal tokens have equal logprobs."""
    sessions: dict[str, list[Call]] = {}
    for call in calls:
        if tuple(call.prompt_ids) in CANARY_PROMPTS:
            continue
        sessions.setdefault(call.session_id, []).append(call)
    return {
        tuple(token for call in taken for token in call.completion_ids): [
            value for call in taken for value in call.logprobs
        ]
        for taken in sessions.values()
    }


def _are_sampled(trained: list[list[Any]], program: dict[str, Any], rollouts: int) -> None:
    """What each rollout trains is all that the engine gave one session, with its logprobs."""
    assert len(trained) == rollouts
    for ids, logprobs in trained:
        assert logprobs == pytest.approx(program["sampled"][tuple(ids)], abs=1e-6)


async def test_each_trainer_leaves_the_roster(done: dict[str, Any]) -> None:
    """The engine of an ended process leaves the roster. Only the newest may still be there."""
    engines = [program["engines"] for program in done.values()]

    assert all(found in ([], [True]) for found in engines)


# --- slime -----------------------------------------------------------------------------------


@pytest.fixture
def slimes(done: dict[str, Any]) -> Any:
    trainers_here.need_slime()
    return done["slime"]


async def test_slime_fills_its_step(slimes: Any) -> None:
    """Its own parser and checks take document 002's launcher line and the page's flags. Its loop finds
    `generate` and the filter by their names: the group without signal is dropped, the next one has both
    siblings, and its post-process gives their advantages."""
    assert (slimes["raw"], slimes["advantages"]) == ([1.0, 0.0], [0.5, -0.5])
    _are_sampled(slimes["trained"], slimes, 2)
    assert all(len(set(lengths)) == 1 for lengths in slimes["lengths"])


async def test_slime_aborts_the_rest(slimes: Any) -> None:
    """The group that still ran when the step was full: both rollouts are cancelled, and come as slime's own
    aborted samples."""
    assert slimes["aborted"] == [[2, True, 0.0]] * 2


async def test_slime_evaluates(slimes: Any) -> None:
    """Its eval path reads the dataset by slime's keys and counts each rollout once."""
    assert slimes["evaluated"] == [1.0]


async def test_slimes_debug_loader_reads_its_dumps(slimes: Any) -> None:
    """`--save-debug-rollout-data`: what slime writes of a step and of an evaluation comes back whole, and
    `--load-debug-rollout-data` gives the same advantages."""
    assert (slimes["dumped"], slimes["read_again"]) == (True, slimes["advantages"])
    assert slimes["read_evaluation"] == [1.0]


# --- SkyRL -----------------------------------------------------------------------------------


async def test_skyrl_accepts_the_generators_output(done: dict[str, Any]) -> None:
    """Its own check passes, in its order, although its client's engines are paused for new weights over and
    over."""
    found = done["skyrl"]

    assert (found["is_generator"], found["fields"], found["updates"] > 1) == (True, [], True)
    assert (found["order"], found["rewards"]) == ([["b", 0], ["a", 1]], [1.0, 0.0])
    _are_sampled(found["trained"], found, 2)
    assert found["counts"]["perdure/left_out"] == 0


@pytest.mark.parametrize("step_wise", ["true", "false"])
async def test_skyrls_experiment_reaches_its_optimizer_step(
    done: dict[str, Any], step_wise: str
) -> None:
    """Its main's own experiment, data, staleness control and conversion, with the class that the page prints:
    the step's tensors hold two groups of two, whose loss takes the tokens that the engine gave them, each with
    its logprob. What follows on a GPU is simulated by SkyRL."""
    found = done[f"skyrl, step-wise {step_wise}"]

    assert (found["rows"], found["uids"]) == (4, ["0", "0", "1", "1"])
    assert found["rewards"] == [0.0, 0.0, 1.0, 1.0]
    _are_sampled(found["trained"], found, 4)


# --- verl ------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["LLMServerClient", "FullyAsyncLLMServerClient"])
async def test_verls_worker_runs_the_agent_loop(done: dict[str, Any], client: str) -> None:
    """Named in its configuration as the page prints it. Two sessions of two prompts reach its queue, each
    with its reward, logprobs, and the versions of the weights. Replicas abort calls for new weights in the
    middle of a turn, and not a token is lost or trained twice. A session's calls stay on one replica."""
    found = done[client]
    ids = [token for taken, _ in found["trained"] for token in taken]
    values = [value for _, taken in found["trained"] for value in taken]

    assert found["keys"] == ["one_0_0", "one_1_0", "two_0_0", "two_1_0"]
    assert {key: found["scores"][key] for key in ("one_0_0", "two_0_0")} == {
        "one_0_0": 1.0,
        "two_0_0": 0.0,
    }
    assert sorted(state for _, state in found["states"]) == ["finished"] * 2 + ["running"] * 2
    (sampled,) = found["sampled"].items()  # verl's servers are not told the session
    assert sorted(ids) == sorted(sampled[0])
    assert sorted(values) == pytest.approx(sorted(sampled[1]), abs=1e-6)
    assert sum(found["preempted"]) == found["calls"]  # once each
    assert found["updates"] > 2
    assert min(tag["min_global_steps"] for tag in found["tags"]) == 5
    assert any(tag["max_global_steps"] > tag["min_global_steps"] for tag in found["tags"])
    assert set(found["servers"]) == {1}


# --- verifiers -------------------------------------------------------------------------------


async def test_verifiers_plays_the_instances(done: dict[str, Any]) -> None:
    """Its loaders find the module that the page prints; an episode survives its wire, its branch holds the
    sampled tokens with their logprobs, its calls how they were sampled. An instance that does not exist is an error, not a reward of 0."""
    found = done["verifiers"]

    assert (found["kind"], found["ids"]) == (
        "PerdureEnv",
        ["tests/add", "tests/leave-it", "tests/absent"],
    )
    assert (found["ok"], found["rewards"]) == ([True, True, False], [1.0, 0.0, 0.0])
    assert (found["branches"], len(found["errors"][2])) == ([1, 1, 0], 1)
    _are_sampled(found["trained"], found, 2)
    assert found["temperatures"] == [[0.8], [0.8], []]
    assert found["roles"][0] == ["user", "assistant", "tool"]


# --- TRL -------------------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["server", "colocate"])
async def trl(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Any]]:
    """Two steps of a group of two, with what the page prints. The stack has no engine but TRL's."""
    home = tmp_path_factory.mktemp("trl")
    page = docs_pages.block("train.md", "python trl").replace("first-steps/h11-0.14.0", INSTANCE)
    (home / "page.py").write_text(page.replace("mini_swe_agent", loop_agent.NAME))
    async with (
        running(home / "stack", named=False) as stack,
        TrlServer(stack.engine) as server,
    ):
        url = server.url if request.param == "server" else stack.engine.url
        found = await trainers_here.run(
            *("trl_vllm.py", request.param, url, home, home / "page.py"),
            **trainers_here.environment(stack),
        )
        found["updates"] += server.asked[UPDATE]
        found["sampled"] = _sampled(stack.engine.calls)
        found["episodes"] = []
        for step in range(2):
            episodes = await read_run(stack.store, f"try-1-0-{step}-1")
            found["episodes"].append([await read_segments(stack.store, one) for one in episodes])
        yield found


async def test_trl_trains_what_its_own_vllm_sampled(trl: dict[str, Any]) -> None:
    """Each token of the loss once, with the logprob that TRL's vLLM gave it, although TRL's client names
    neither the session nor why a completion ended."""
    (sampled,) = trl["sampled"].items()
    ids = [token for one, _ in trl["trained"] for token in one]
    logprobs = [value for _, values in trl["trained"] for value in values]

    assert len(trl["trained"]) == 4
    assert sorted(ids) == sorted(sampled[0])
    assert sorted(logprobs) == pytest.approx(sorted(sampled[1]), abs=1e-6)


async def test_trl_publishes_its_own_weights(trl: dict[str, Any]) -> None:
    """Before each step, once. All turns of the step have its number as their policy version."""
    versions = [
        {version for one in step for segment in one.segments for version in segment.versions} - {-1}
        for step in trl["episodes"]
    ]

    assert (versions, trl["updates"]) == ([{0}, {1}], 2)
    assert [[one.episode.reward for one in step] for step in trl["episodes"]] == [[1.0, 1.0]] * 2


async def test_colocated_vllm_runs_in_trls_thread(trl: dict[str, Any]) -> None:
    """Calls of both siblings run together, and it sleeps while TRL trains."""
    assert trl["colocated"] in ([], [[True, 2, True]])


# --- TorchTitan ------------------------------------------------------------------------------


def launched(module: str) -> list[str]:
    """The options of a module's command, as the page prints it."""
    page = (ROOT / "docs/train.md").read_text()
    said = re.search(rf"python -m {re.escape(module)} (.*?)\n(?! {{8}})", page, re.DOTALL)
    assert said is not None
    return said[1].replace("\\\n", " ").partition("#")[0].split()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def titan(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[dict[str, Any]]:
    """One group of two through the controller's loops, sampled by its own generator."""
    home = tmp_path_factory.mktemp("titan")
    rows = home / "rows.jsonl"
    rows.write_text(json.dumps({"instance": INSTANCE}))
    async with running(home / "stack", named=False) as stack, ScriptedEngine(IDLES) as idles:
        options = launched("torchtitan.experiments.rl.train")
        arguments = (rows, stack.engine.url, idles.url, *options)
        yield await trainers_here.run(
            "torchtitan_loop.py", *arguments, **trainers_here.environment(stack)
        )


async def test_torchtitan_packs_what_its_generator_sampled(titan: dict[str, Any]) -> None:
    """The tokens that its loss takes are those that `generate_fn` gave, each once, with their logprobs."""
    ids, logprobs = titan["trained"]
    sampled = titan["sampled"]

    assert sorted(ids) == sorted(token for one, _ in sampled for token in one)
    assert sorted(logprobs) == pytest.approx(sorted(v for _, values in sampled for v in values))


async def test_torchtitans_group_has_its_advantages(titan: dict[str, Any]) -> None:
    """One sibling resolved the instance, the other did not; context has none."""
    assert titan["advantages"] == [-0.5, 0.0, 0.5]
    assert set(titan["min_policy_versions"]) == {3}


async def test_torchtitans_sampling_reaches_its_generator(titan: dict[str, Any]) -> None:
    """As the controller's configuration says; the seed is a call's own. The turns of its rollouts say so."""
    said = titan["sampling"]

    assert (said["temperature"], said["top_p"], said["max_tokens"]) == (0.8, 0.9, 512)
    assert said["seed"] != 7
    assert said in [{name: turn[name] for name in said} for turn in titan["told"]]


async def test_torchtitan_logs_a_step(titan: dict[str, Any]) -> None:
    """Ours and the generator's own metrics come out of the batch."""
    metrics = titan["metrics"]

    assert metrics["perdure/solved/mean"] == 0.5
    assert metrics["perdure/left_out/mean"] == 0.0
    assert metrics["generator/tokens/mean"] > 0


async def test_torchtitans_launcher_finds_the_recipe(titan: dict[str, Any]) -> None:
    """By the options that the page prints, and the other sizes by their names."""
    assert titan["recipe"] == ["PerdureRollouter.Config", "try-1", "claude_code", "daytona"]
    sizes = ["1.7B", "14B", "30B-A3B", "32B", "8B"]
    assert titan["recipes"] == sorted([*sizes, *sizes])  # each also under document 004's name


@pytest.mark.parametrize("size", ["1_7b", "8b", "14b", "32b", "30b_a3b"])
async def test_torchtitans_launcher_reads_document_004s_line(size: str) -> None:
    """Its variables and its recipe's name, with only the module's name changed."""
    found = await trainers_here.run(
        *("torchtitan_launch.py", "--module", "perdure.integrations.torchtitan"),
        *("--config", f"rl_grpo_qwen3_{size}_swe_r2e"),
        **{"DAYTONA_API_KEY": "dtn_0", "PROMPT_DATA": "/path/to/r2e.jsonl"},
        HF_ASSETS_PATH="/path/to/Qwen3",
    )

    assert found.pop("run_id").startswith("torchtitan-")
    assert found == {
        "assets": "/path/to/Qwen3",
        "size": size.upper().replace("_A", "-A").replace("_", "."),
        "sandbox": "daytona",
        "agent": "claude_code",
        "rows": "/path/to/r2e.jsonl",
        "dataset": "r2e",
    }


async def test_torchtitans_smoke_runs_a_group(tmp_path: Path) -> None:
    """The command that the page prints: two rollouts, and what a trainer would pack of them."""
    async with running(tmp_path / "stack", named=False) as stack:
        said = launched("perdure.integrations.torchtitan.smoke")
        swapped = {"first-steps/h11-0.14.0": INSTANCE, "URL": stack.engine.url}
        options = [swapped.get(one, one) for one in said]
        found = await trainers_here.run(
            "torchtitan_smoke.py",
            *(*options, "--agent", loop_agent.NAME),
            **trainers_here.environment(stack),
        )
        turns = [one for one in stack.engine.calls if tuple(one.prompt_ids) not in CANARY_PROMPTS]

    assert (found["rewards"], found["advantages"]) == ([1.0, 1.0], [0.0, 0.0])
    assert found["turns"] == [TURNS, TURNS]
    trained = sum(sample["trained"] for sample in found["samples"])
    assert trained == sum(len(one.completion_ids) for one in turns)
