"""SGLang's control routes with the interface of vLLM's: probes, pause, weights.

Written against the release SGLang 0.5.23.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.engines.clients.sampled_tokens import check_ids, check_logprobs
from perdure.engines.clients.vllm_control import (
    GREEDY,
    PROBE_S,
    PROBE_SESSION,
    EngineControl,
    Scored,
    Served,
    Vitals,
    object_of,
    samples,
)
from perdure.errors import ConfigurationError

PAUSES = {"abort": "abort", "keep": "retract", "wait": "retract"}
"""`retract` puts running requests back into the queue, and recomputes their KV later."""


class SglangControl(EngineControl):
    """The control plane of one SGLang server, started with --enable-metrics."""

    processed_by = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
    _path = ""

    async def vitals(self) -> Vitals:
        response = await self._send("GET", "/metrics", timeout=self._probe_s)
        return read_sglang_vitals(response.text)

    async def served(self, model: str, vitals: Vitals) -> Served:
        """The server's fenced name; empty after an update, which renames the server to its new folder. The
        root is left out, because SGLang reports the name there instead of the model."""
        return Served((await super().served(model, Vitals())).start_id)

    async def score(
        self,
        model: str,
        prompt_ids: Sequence[int],
        *,
        prompt_logprobs: bool = False,
        sampling: Mapping[str, float] = GREEDY,
        timeout_s: float = PROBE_S,
    ) -> Scored:
        body = {
            "input_ids": list(prompt_ids),
            "sampling_params": {"max_new_tokens": 1, **sampling},
            "return_logprob": True,
            **({"logprob_start_len": 0} if prompt_logprobs else {}),
        }
        headers = {"x-session-id": PROBE_SESSION}
        response = await self._send("POST", "/generate", body, headers=headers, timeout=timeout_s)
        try:
            about = object_of(response)["meta_info"]
            value, token = about["output_token_logprobs"][0][:2]
            read = about["input_token_logprobs"][1:] if prompt_logprobs else ()
            check_ids([token], self.vocabulary)
            check_logprobs([float(value)])
            return Scored(token, float(value), [float(entry[0]) for entry in read])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._failed(f"sampled no token: {error!r}") from error

    async def version(self) -> int | None:
        response = await self._send("GET", "/model_info", timeout=self._probe_s, absent_ok=True)
        return self._version_of(response)

    async def pause(self, mode: str) -> None:
        await self._send("POST", "/pause_generation", {"mode": PAUSES[mode]}, timeout=120.0)

    async def resume(self) -> None:
        await self._send("POST", "/continue_generation", {}, timeout=60.0)

    async def start_update(self) -> None:
        self._path = ""

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Only remember the folder: SGLang loads and labels weights in one call, at `finish_update`.

        Raises: ConfigurationError.
        """
        if "path" not in info:
            raise ConfigurationError("SGLang reads weights from a folder: use FromDisk")
        self._path = str(info["path"])

    async def finish_update(self, version: int) -> None:
        body = {"model_path": self._path, "weight_version": str(version), "flush_cache": True}
        await self._send("POST", "/update_weights_from_disk", body, timeout=1800.0)

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Does nothing, because SGLang needs no such call to read a folder."""


def read_sglang_vitals(text: str) -> Vitals:
    """Sum over data-parallel ranks and modes; the KV share is the fullest rank's."""
    sums: dict[str, float] = {}
    kv_used = 0.0
    for name, labels, value in samples(text):
        if re.search(r'tp_rank="[1-9]', labels):
            continue  # every tensor-parallel rank counts the same requests
        sums[name] = sums.get(name, 0.0) + value
        if name == "sglang:token_usage":
            kv_used = max(kv_used, value)
    started = sums.get("process_start_time_seconds")
    kv_tokens = int(sums.get("sglang:max_total_num_tokens", 0))
    return Vitals(
        started="" if started is None else f"{started:.2f}",
        running=sums.get("sglang:num_running_reqs", 0.0),
        waiting=sums.get("sglang:num_queue_reqs", 0.0),
        tokens=sums.get("sglang:generation_tokens_total"),
        preemptions=sums.get("sglang:num_retracted_requests_total", 0.0),
        kv_used=kv_used,
        kv_tokens=kv_tokens or None,
        cache_queries=sums.get("sglang:prompt_tokens_total", 0.0),
        cache_hits=sums.get("sglang:cached_tokens_total", 0.0),
    )
