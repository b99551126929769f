"""TRL's GRPOTrainer learns through Perdure's engines (`engine="perdure"`): a real stack, a real vLLM on CPU,
a tiny random model.

Run by `make test-trainers`. Each rollout is three turns in a sandbox; its reward is one bit of what the
model said, so siblings differ. Installs TRL and vLLM below .perdure, once.
"""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

from perdure.engines.engine_roster import StoredRoster, add_engine, roster_key
from perdure.engines.engine_state import EngineSpec
from perdure.episodes.episode_store import read_run, read_segments
from perdure.home_folder import load_secret
from perdure.instances import instance_catalog
from perdure.storage.base import Store
from perdure.types import Grading, Instance, Source, SourceKind
from tests import docs_pages
from tests.real import note_agent, trainers_here
from tests.real.test_vllm import _serving, installed
from tests.real.test_vllm_weights import install_plugin
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import Stack, running
from tests.stack.wait_until import until

__all__ = ["installed"]  # a fixture
pytestmark = [pytest.mark.temporal, pytest.mark.asyncio(loop_scope="module")]
PARITY = "tests/parity"
EVEN = 'python3 -c \'assert sum(open("answer.txt", "rb").read()) % 2 == 0\''
STEPS, SIBLINGS = 2, 8
TOLERANCE = 0.005
"""Two kernels in float32."""


class Learned(NamedTuple):
    told: dict[str, Any]
    """What the trainer saw."""
    store: Store
    versions: list[list[int]]
    """Of each step's episodes."""
    recorded: list[list[dict[str, Any]]]
    """The last segment of each rollout of each step, by sample."""


@pytest.fixture(scope="module")
def engine(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if reason := why_not_here():
        pytest.skip(reason)
    trainers_here.install()
    install_plugin(installed)
    flags = ["--weight-transfer-config", json.dumps({"backend": "perdure-disk"})]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with _serving(installed, log, "--dtype", "float32", *flags) as url:
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def learned(
    engine: str, installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Learned]:
    home = tmp_path_factory.mktemp("trl")
    async with running(home / "stack", named=False) as stack:
        await _instance(stack)
        await _join(stack, engine)
        page = docs_pages.block("train.md", "python trl").replace("first-steps/h11-0.14.0", PARITY)
        agent = 'mini_swe_agent"'
        own = f'{note_agent.NAME}", engine="perdure"'
        (home / "page.py").write_text(page.replace(agent, own))
        arguments = (installed / "model", home / "out", home / "page.py")
        told = await trainers_here.run(
            "trl_grpo.py", *arguments, **trainers_here.environment(stack)
        )
        found = [await _recorded(stack.store, f"try-1-0-{step}-1") for step in range(STEPS)]
        versions = [
            [version for one in episodes for version in one["versions"]] for episodes in found
        ]
        yield Learned(told, stack.store, versions, found)


async def _instance(stack: Stack) -> None:
    tree = stack.home / "trees/parity"
    tree.mkdir(parents=True)
    (tree / "README").write_text("Nothing to fix.\n")
    dataset, _, name = PARITY.partition("/")
    instance = Instance(
        instance_id=name,
        dataset=dataset,
        problem_statement="Say anything.",
        source=Source(kind=SourceKind.DIRECTORY, path=str(tree)),
        grading=Grading(protocol="eval_cmd", eval_cmd=EVEN, timeout_s=60),
    )
    await instance_catalog.save(stack.store, instance)


async def _join(stack: Stack, url: str) -> None:
    """The engine in the roster, once a gateway has found it ready."""
    roster = StoredRoster(stack.store, roster_key(load_secret(stack.settings)))
    record = await add_engine(roster, EngineSpec(url), "policy")

    async def serves() -> bool:
        found = (await roster.read()).get(record.name)
        return found is not None and found.serves

    await until(serves, "the engine has sampled a token")


async def _recorded(store: Store, run_id: str) -> list[dict[str, Any]]:
    rows = []
    for episode in await read_run(store, run_id):
        last = (await read_segments(store, episode)).segments[-1]
        rows.append(
            {
                "ids": list(last.response_ids),
                "mask": list(last.loss_mask),
                "logprobs": list(last.logprobs),
                "reward": episode.reward,
                "temperature": last.temperature,
                "turns": len(last.turns),
                "versions": sorted({v for v in last.versions if v >= 0}),
            }
        )
    return rows


async def test_trl_trains_what_was_sampled(learned: Learned) -> None:
    """Ids, mask and logprobs of each step's loss are those of its episodes, three turns a row."""
    for step, episodes in zip(learned.told["steps"], learned.recorded, strict=True):
        taken = sorted((row["ids"], row["mask"]) for row in step["rows"])

        assert taken == sorted((one["ids"], one["mask"]) for one in episodes)
        assert len(taken) == SIBLINGS
        assert {one["turns"] for one in episodes} == {note_agent.TURNS}
        by_ids = {tuple(one["ids"]): one["logprobs"] for one in episodes}
        for row in step["rows"]:
            assert row["logprobs"] == pytest.approx(by_ids[tuple(row["ids"])], abs=1e-6)


async def test_trls_advantages_are_the_rewards(learned: Learned) -> None:
    """A resolved rollout gains where a sibling is not resolved."""
    for step, episodes in zip(learned.told["steps"], learned.recorded, strict=True):
        rewards = {tuple(one["ids"]): one["reward"] for one in episodes}
        mean = sum(rewards[tuple(row["ids"])] for row in step["rows"]) / SIBLINGS
        for row in step["rows"]:
            gained = rewards[tuple(row["ids"])] - mean

            assert (row["advantage"] > 0) == (gained > 0)
            assert (row["advantage"] < 0) == (gained < 0)


async def test_each_steps_weights_sample_its_rollouts(learned: Learned) -> None:
    """The optimizer changed the weights, the engine took them, and the trainer's logprobs of what it
    sampled, at the trainer's temperature, are the recorded ones: no token is off policy."""
    before, after = (step["weights"] for step in learned.told["steps"])

    assert len({before, after, learned.told["weights"]}) == 3
    assert [set(versions) for versions in learned.versions] == [{0}, {1}]
    assert {one["temperature"] for episodes in learned.recorded for one in episodes} == {0.8}
    for step in learned.told["steps"]:
        assert step["gap"] < TOLERANCE
        assert step["ratio"] == pytest.approx([1.0, 1.0], abs=0.2)
