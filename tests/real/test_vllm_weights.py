"""New weights in a real vLLM on CPU, in the middle of a request: run by `make test-vllm` (slow).

Two random tiny models stand for two versions; what the trainer says of them is computed by
transformers. vLLM reads the folders through the plugin that ships with Perdure.
"""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from perdure.engines.base import Completion
from perdure.engines.clients.hosted_requests import new_client
from perdure.engines.engine_roster import StoredRoster, roster_key
from perdure.engines.engine_state import EngineSpec
from perdure.engines.pool.completion_call import GenerateCall
from perdure.engines.pool.engine_fleet import PoolOptions
from perdure.engines.pool.engine_pool import EnginePool
from perdure.engines.weights.weight_publishing import Weights
from perdure.engines.weights.weight_update import (
    InFlight,
    UpdatePolicy,
    UpdateRefused,
    WeightCanary,
)
from perdure.home_folder import load_secret
from perdure.python_interpreters import find_uv
from perdure.settings.settings_tree import Settings
from perdure.storage.store_url import open_store
from tests.real.test_vllm import PREFILL_TOLERANCE, PROMPT, ROOT, _serving, installed

__all__ = ["installed"]  # a fixture
PROMPTS = [PROMPT[n:] for n in range(8)]
CANARIES = 4
"""Those prompts after which one token is clearly the likeliest: of two that tie in bf16, vLLM may take
the other one."""
LONG = {"max_tokens": 1600, "temperature": 1.0, "top_p": 1.0}
"""Longer than any update takes to begin, also on a busy host. Noise of a random model: about once in 150,000 tokens it ends by itself."""


@dataclass(frozen=True)
class Trainer:
    """One version's folder, and what transformers makes of it."""

    python: Path
    folder: Path
    canaries: list[WeightCanary] = field(default_factory=list)

    def scored(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        script = ROOT / "tests/real/vllm/trainer.py"
        request = json.dumps([list(ids) for ids in prompts])
        done = subprocess.run(
            [self.python, script, self.folder],
            input=request,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    def with_canaries(self) -> "Trainer":
        pairs = zip(PROMPTS, self.scored(PROMPTS), strict=True)
        clear = sorted(pairs, key=lambda pair: -pair[1].pop("ahead"))[:CANARIES]
        canaries = [WeightCanary(prompt_ids=tuple(ids), **found) for ids, found in clear]
        return replace(self, canaries=canaries)


@pytest.fixture(scope="session")
def trainers(installed: Path) -> list[Trainer]:
    """Two versions, from two random states."""
    python, other = installed / "venv/bin/python", installed / "model-2"
    if not (other / "model.safetensors").exists():
        script = ROOT / "tests/real/vllm/make_model.py"
        subprocess.run([python, script, other, "1"], check=True, capture_output=True)
    folders = (installed / "model", other)
    return [Trainer(python, folder).with_canaries() for folder in folders]


def install_plugin(installed: Path) -> None:
    """As a user installs it."""
    python = installed / "venv/bin/python"
    fresh = ["--no-deps", "--reinstall-package", "perdure", "-p", str(python), str(ROOT)]
    install = [str(find_uv()), "pip", "install", "-q", *fresh]
    done = subprocess.run(install, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]


@pytest.fixture(scope="session")
def updatable(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the plugin."""
    install_plugin(installed)
    flags = ["--weight-transfer-config", json.dumps({"backend": "perdure-disk"})]
    with _serving(installed, tmp_path_factory.mktemp("updatable") / "log", *flags) as url:
        yield url


@dataclass
class Stand:
    """A gateway's pool and a trainer's weights, in one home."""

    pool: EnginePool
    weights: Weights

    def ask(self, **sampling: Any) -> "asyncio.Task[Completion]":
        call = self.pool.generate(GenerateCall(PROMPT, LONG | sampling, "s", "s-0"))
        return asyncio.ensure_future(call)

    async def sampling(self) -> None:
        """Until a completion is well under way."""
        while not any(
            len(call.salvage.ids) >= 40
            for pooled in self.pool.engines.values()
            for call in pooled.running
        ):
            await asyncio.sleep(0.01)


@asynccontextmanager
async def stand(url: str, home: Path) -> AsyncIterator[Stand]:
    settings = Settings(home=home, store=str(home / "store"))
    roster = StoredRoster(open_store(settings), roster_key(load_secret(settings)))
    async with new_client() as client, Weights(settings, notice_s=0.5) as weights:
        pool = EnginePool(roster, client, [EngineSpec(url)], PoolOptions(poll_s=0.1))
        await pool.start()
        try:
            while not all(pooled.record.serves for pooled in pool.engines.values()):
                await asyncio.sleep(0.05)
            yield Stand(pool, weights)
        finally:
            await pool.aclose()


def recorded_versions(completion: Completion) -> list[int]:
    versions = [-1] * len(completion.token_ids)
    for span in completion.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


async def true_versions(
    completion: Completion, trainers: Sequence[Trainer], first: int
) -> list[int]:
    """Whose logprob each token was given: that of the version that sampled it. `first`: the first
    trainer's."""
    whole = [*PROMPT, *completion.token_ids]
    found = [await asyncio.to_thread(one.scored, [whole]) for one in trainers]
    said = [one[0]["prompt_logprobs"][len(PROMPT) - 1 :] for one in found]
    return [
        first + min(range(len(said)), key=lambda v: abs(said[v][i] - logprob))
        for i, logprob in enumerate(completion.logprobs)
    ]


@pytest.mark.parametrize(("in_flight", "version"), [("resubmit", 1), ("keep", 3)])
async def test_each_token_is_recorded_with_the_weights_that_sampled_it(
    updatable: str, trainers: list[Trainer], tmp_path: Path, in_flight: InFlight, version: int
) -> None:
    """An update in the middle of a request; transformers tells whose logprob each token has."""
    first, second = trainers
    async with stand(updatable, tmp_path) as it:
        await it.weights.publish(version, first.folder, first.canaries)
        call = it.ask()
        await it.sampling()
        await it.weights.publish(
            version + 1, second.folder, second.canaries, UpdatePolicy(in_flight=in_flight)
        )
        completion = await call

    recorded = recorded_versions(completion)
    true = await true_versions(completion, trainers, version)
    wrong = sum(a != b for a, b in zip(recorded, true, strict=True))
    assert set(recorded) == {version, version + 1}
    assert recorded == sorted(recorded)
    assert wrong <= len(true) // 50, (wrong, recorded, true)  # two models may agree on a token


async def test_weights_that_transformers_denies_are_taken_back(
    updatable: str, trainers: list[Trainer], tmp_path: Path
) -> None:
    """One wrong logprob among four prompts: the version before is loaded, proven and served."""
    first, second = trainers
    right = second.canaries
    wrong = [*right[:3], right[3].model_copy(update={"logprob": right[3].logprob - 1})]
    async with stand(updatable, tmp_path) as it:
        await it.weights.publish(5, first.folder, first.canaries)
        with pytest.raises(UpdateRefused, match="trainer's weights"):
            await it.weights.publish(6, second.folder, wrong)
        completion = await it.ask(max_tokens=32)
        published = await it.weights.published()

    again = first.scored([[*PROMPT, *completion.token_ids]])[0]["prompt_logprobs"]
    assert published is not None
    assert published.version == 5
    assert set(recorded_versions(completion)) == {5}
    assert list(completion.logprobs) == pytest.approx(
        again[len(PROMPT) - 1 :], abs=PREFILL_TOLERANCE
    )


async def test_a_folder_without_weights_costs_no_engine(
    updatable: str, trainers: list[Trainer], tmp_path: Path
) -> None:
    """vLLM keeps its weights, and takes the right folder next."""
    first, second = trainers
    async with stand(updatable, tmp_path) as it:
        await it.weights.publish(7, first.folder, first.canaries)
        with pytest.raises(UpdateRefused, match=r"cannot open the checkpoint.*kept its weights"):
            await it.weights.publish(8, tmp_path / "absent", second.canaries)
        completion = await it.ask(max_tokens=32)
        await it.weights.publish(8, second.folder, second.canaries)

    assert set(recorded_versions(completion)) == {7}
