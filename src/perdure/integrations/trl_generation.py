"""Samples with the vLLM that TRL has started: its server, or the one in the trainer's process.

TRL updates its vLLM before it calls a `rollout_func`, and only then. So all turns of a call have one policy
version, the trainer's step. Both report the logprobs of the distribution that they sample from.
"""

import asyncio
import contextlib
import itertools
import re
from collections.abc import Awaitable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from perdure.dialects.base import Refused
from perdure.engines.function_engine import Ask, Sampled
from perdure.errors import ConfigurationError
from perdure.integrations.trainer_engine import VLLM_SAMPLING, finish_reason_of
from perdure.types import FinishReason

COLOCATE = "colocate"
PROCESSED = "processed_logprobs"
ACCEPTED = VLLM_SAMPLING | {"structured_outputs"}
CALLS = 256
"""The most calls of TRL's client at a time, as many as vLLM runs by default (`max_num_seqs`)."""
IDLE_S = 0.01
"""Seconds between looks for new calls while vLLM has none."""
REFUSAL = re.compile(r"Request failed: (\d+), (.*)", re.DOTALL)
"""TRL's client raises a plain `Exception` with this text if the server refuses a request."""

Found = TypeVar("Found")


class ServerGeneration:
    """TRL's vLLM server. The main process has the only client, and samples for all processes."""

    def __init__(self, trainer: Any) -> None:
        """Raises: ConfigurationError if the server's logprobs are not those of its sampling."""
        self._trainer = trainer
        self._client = trainer.vllm_generation.vllm_client
        model = self._client.get_server_info()["model_config"]
        if model["logprobs_mode"] != PROCESSED:
            raise ConfigurationError(
                f"TRL's vLLM server at {self._client.base_url} reports logprobs before temperature and "
                f"top_p: restart it with --logprobs-mode {PROCESSED}"
            )
        self._context = model.get("max_model_len")
        self._threads = ThreadPoolExecutor(CALLS, "trl-client")

    async def sample(self, ask: Ask) -> Sampled:
        """Raises: Refused if the server refuses the content of the request."""
        oldest = self._trainer._last_loaded_step
        loop = asyncio.get_running_loop()
        output = await loop.run_in_executor(self._threads, self._generate, ask)
        ids = output["completion_ids"][0]
        ranked = zip(output["logprob_token_ids"][0], output["logprobs"][0], strict=True)
        logprobs = [
            values[tokens.index(token)] for token, (tokens, values) in zip(ids, ranked, strict=True)
        ]
        reason = finish_reason_of(ask, ids, self._context)
        return Sampled(ids, logprobs, reason, oldest, self._trainer._last_loaded_step)

    async def until(self, rollouts: Awaitable[Found]) -> Found:
        return await rollouts

    def _generate(self, ask: Ask) -> Any:
        try:
            return self._client.generate([ask.prompt_ids], generation_kwargs=dict(ask.sampling))
        except Exception as error:  # TRL's client raises no narrower class
            if (said := REFUSAL.match(str(error))) is None:
                raise
            raise Refused(int(said[1]), "engine_refused", said[2]) from None


class _Call(NamedTuple):
    ask: Ask
    sampled: "Future[Sampled]"


class ColocatedGeneration:
    """The vLLM in the trainer's process. It and CUDA belong to TRL's thread, so `sample` only leaves a
    call for `until`, which runs vLLM there. A call between steps waits for the next step."""

    def __init__(self, trainer: Any) -> None:
        """Raises: ConfigurationError."""
        if trainer.vllm_generation.tensor_parallel_size > 1:
            raise ConfigurationError(
                "vllm_tensor_parallel_size must be 1, because colocated processes that share one engine would "
                'have to sample the same calls: use vllm_mode="server"'
            )
        self._trainer = trainer
        self._vllm = trainer.vllm_generation
        self._engine = self._vllm.llm.llm_engine
        self._asked: SimpleQueue[_Call] = SimpleQueue()
        self._running: dict[str, _Call] = {}
        """By vLLM's request id."""
        self._numbers = itertools.count()

    async def sample(self, ask: Ask) -> Sampled:
        call = _Call(ask, Future())
        self._asked.put(call)
        return await asyncio.wrap_future(call.sampled)

    async def until(self, rollouts: Awaitable[Found]) -> Found:
        """Run vLLM in steps, so that a new call joins those that run."""
        waiting = asyncio.ensure_future(rollouts)
        self._wake()
        try:
            while not waiting.done():
                self._add_calls()
                self._step()
                await asyncio.sleep(0 if self._running else IDLE_S)
            return waiting.result()
        finally:
            self._end_step()

    def _wake(self) -> None:
        """As TRL does before it generates: level 2 of vLLM's sleep discards the weights."""
        if self._vllm.enable_sleep_mode:
            if self._vllm._llm_weights_sleeping:
                self._vllm.sync_weights()
            self._vllm.llm.wake_up(tags=["kv_cache"])

    def _end_step(self) -> None:
        """Drop calls that no rollout waits for: the weights change next."""
        self._engine.abort_request(list(self._running))
        for call in self._running.values():
            _settle(call, RuntimeError("the training step has ended"))
        self._running.clear()
        if self._vllm.enable_sleep_mode:
            self._vllm.llm.sleep(level=2)
            self._vllm._llm_weights_sleeping = True

    def _add_calls(self) -> None:
        while not self._asked.empty():
            call = self._asked.get()
            name = f"perdure-{next(self._numbers)}"
            prompt = {"prompt_token_ids": list(call.ask.prompt_ids)}
            try:
                self._engine.add_request(name, prompt, _sampling_params(call.ask))
            except Exception as error:  # vLLM's classes differ by version
                _settle(call, Refused(400, "engine_refused", str(error)))
            else:
                self._running[name] = call

    def _step(self) -> None:
        for name in [name for name, call in self._running.items() if call.sampled.cancelled()]:
            self._engine.abort_request([name])
            del self._running[name]
        for output in self._engine.step() if self._running else ():
            if output.finished and (call := self._running.pop(output.request_id, None)):
                _settle(call, self._sampled(output.outputs[0]))

    def _sampled(self, output: Any) -> Sampled | Exception:
        if output.finish_reason not in tuple(FinishReason):
            return RuntimeError(f"vLLM ended the call: {output.finish_reason}")
        ids = list(output.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=True)]
        reason = FinishReason(output.finish_reason)
        return Sampled(ids, logprobs, reason, self._trainer._last_loaded_step)


def _sampling_params(ask: Ask) -> Any:
    from vllm import sampling_params

    given = {**ask.sampling, "logprobs": 0}
    given["output_kind"] = sampling_params.RequestOutputKind.FINAL_ONLY
    if grammar := given.get("structured_outputs"):
        given["structured_outputs"] = sampling_params.StructuredOutputsParams(**grammar)
    return sampling_params.SamplingParams.from_optional(**given)


def _settle(call: _Call, found: Sampled | Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # the gateway has given up the call
        if isinstance(found, Sampled):
            call.sampled.set_result(found)
        else:
            call.sampled.set_exception(found)


Generation = ServerGeneration | ColocatedGeneration


def generation_of(trainer: Any) -> Generation | None:
    """TRL's vLLM in this process; None if only the main process has its client.

    Raises: ConfigurationError.
    """
    if not trainer.use_vllm:
        raise ConfigurationError(
            "use_vllm is false, so TRL has no engine: set use_vllm=True in its configuration, or pass "
            'engine="perdure" to `Rollouts`'
        )
    if trainer.vllm_generation.mode == COLOCATE:
        return ColocatedGeneration(trainer)
    return ServerGeneration(trainer) if trainer.accelerator.is_main_process else None
