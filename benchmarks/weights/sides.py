"""The engines that get new weights, the weights of a version, and how its tokens are recognised."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks import vllm_server
from benchmarks.vllm_server import ROOT, VLLM
from perdure.engines.base import Completion
from perdure.engines.clients.vllm_control import EngineControl
from perdure.engines.weights.update import FromDisk, Transfer, WeightCanary
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.testing.scripted_engine import WEIGHTS_FILE, ScriptedEngine, logprob

CANARIES = 4
BF16 = 0.02
"""More than vLLM's logprobs of the small random models differ from those of transformers. The other
model's differ by 0.3 on average."""
TOKENIZER = load_tokenizer("qwen3")
PROMPT = (
    *TOKENIZER.encode_plain("The repository is small, and the fault is smaller."),
    TOKENIZER.convert_tokens_to_ids("<|im_start|>"),
    *TOKENIZER.encode_plain("assistant\n"),
)


class Side(Protocol):
    urls: list[str]
    sampling: dict[str, Any]

    def source(self, version: int) -> Transfer: ...

    async def canaries(self, version: int) -> list[WeightCanary]: ...

    async def wrong(self, completions: Sequence[Completion]) -> int:
        """Tokens whose recorded version is missing, or is not the one that sampled them."""
        ...


@dataclass(frozen=True)
class Slow:
    """A checkpoint that takes `seconds` longer to load."""

    source: FromDisk
    seconds: float

    async def load(self, control: EngineControl, version: int) -> None:
        await asyncio.sleep(self.seconds)
        await self.source.load(control, version)


@dataclass
class Scripted:
    """Scripted engines: a token's logprob says which weights the engine held."""

    urls: list[str]
    folder: Path
    load_s: float
    first: int
    """The token that every completion begins with."""
    sampling: dict[str, Any]

    def source(self, version: int) -> Transfer:
        folder = self.folder / str(version)
        folder.mkdir(exist_ok=True)
        (folder / WEIGHTS_FILE).write_text(json.dumps({"weights": version}))
        return Slow(FromDisk(folder), self.load_s)

    async def canaries(self, version: int) -> list[WeightCanary]:
        said = logprob(self.first, 0, version)
        return [WeightCanary(prompt_ids=PROMPT, token_id=self.first, logprob=said, tolerance=0.01)]

    async def wrong(self, completions: Sequence[Completion]) -> int:
        return sum(
            logprob(token, place, version) != said
            for one in completions
            for place, (token, said, version) in enumerate(
                zip(one.token_ids, one.logprobs, recorded(one), strict=True)
            )
        )


@contextlib.asynccontextmanager
async def scripted(
    count: int, folder: Path, *, tokens: int, chunk_s: float, load_s: float
) -> AsyncIterator[Scripted]:
    words = " ".join(f"word{n}" for n in range(tokens // 3))
    engines = [
        ScriptedEngine({"default": {"turns": [{"content": words}]}}, chunk_delay_s=chunk_s)
        for _ in range(count)
    ]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            engine.weights = 1
            await stack.enter_async_context(engine)
        first = TOKENIZER.encode_plain("word0")[0]
        yield Scripted([e.url for e in engines], folder, load_s, first, {"max_tokens": tokens * 2})


@dataclass
class Vllm:
    """One real server on CPU that serves two random models in turn; transformers tells which of them
    sampled a token."""

    urls: list[str]
    sampling: dict[str, Any]
    said: dict[int, list[WeightCanary]] = field(default_factory=dict)
    """Keyed by the version modulo 2."""

    def _folder(self, version: int) -> Path:
        return VLLM / ("model" if version % 2 else "model-2")

    def source(self, version: int) -> Transfer:
        return FromDisk(self._folder(version))

    async def canaries(self, version: int) -> list[WeightCanary]:
        """Prompts with a clearly most likely token: of two that tie in bf16, vLLM may choose the other."""
        if version % 2 not in self.said:
            prompts = [PROMPT[n:] for n in range(8)]
            found = await asyncio.to_thread(_scored, self._folder(version), prompts)
            pairs = zip(prompts, found, strict=True)
            clear = sorted(pairs, key=lambda pair: -pair[1].pop("ahead"))[:CANARIES]
            self.said[version % 2] = [WeightCanary(prompt_ids=ids, **said) for ids, said in clear]
        return self.said[version % 2]

    async def wrong(self, completions: Sequence[Completion]) -> int:
        """Tokens whose logprob is the other model's. Where the two models nearly agree, a token counts as
        right."""
        whole = [[*PROMPT, *one.token_ids] for one in completions]
        odd = await asyncio.to_thread(_scored, self._folder(1), whole)
        even = await asyncio.to_thread(_scored, self._folder(2), whole)
        wrong = 0
        for one, by_odd, by_even in zip(completions, odd, even, strict=True):
            start = len(PROMPT) - 1
            said = zip(
                by_odd["prompt_logprobs"][start:], by_even["prompt_logprobs"][start:], strict=True
            )
            for (a, b), logprob_, version in zip(said, one.logprobs, recorded(one), strict=True):
                ours, others = (a, b) if version % 2 else (b, a)
                away = abs(ours - logprob_)
                wrong += version < 1 or (away > BF16 and away > abs(others - logprob_))
        return wrong


def _scored(model: Path, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [VLLM / "venv/bin/python", ROOT / "tests/real/vllm/trainer.py", model],
        input=json.dumps([list(ids) for ids in prompts]),
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@contextlib.asynccontextmanager
async def vllm(folder: Path, *, tokens: int) -> AsyncIterator[Vllm]:
    """The server that `make test-vllm` installed. Raises: RuntimeError if it is missing or ends."""
    if not (VLLM / "model-2/model.safetensors").exists():
        raise RuntimeError("no vLLM here: run `make test-vllm` first")
    flags = ("--weight-transfer-config", json.dumps({"backend": "perdure-disk"}))
    async with vllm_server.serving(folder / "vllm.log", *flags) as url:
        yield Vllm([url], {"max_tokens": tokens, "temperature": 1.0, "top_p": 1.0})


def recorded(completion: Completion) -> list[int]:
    """The version of each token; -1 if unknown. Shape [C]."""
    versions = [-1] * len(completion.token_ids)
    for span in completion.versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions
