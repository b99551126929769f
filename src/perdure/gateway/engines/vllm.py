"""vLLM's token endpoint: token ids in; token ids, logprobs and weight versions out.

The server must run with `--enable-scale-out`, and with `--logprobs-mode processed_logprobs` for
logprobs of the distribution that was really sampled.
"""

import json
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from perdure.gateway.base import NO_LABELS, Completion
from perdure.gateway.engines.wire import PATIENCE_S, Wire, engine_name
from perdure.gateway.prompt_ids import PromptIds
from perdure.types import FinishReason, VersionSpan

MISSING_LOGPROB = -9999.0
"""vLLM's stand-in for a logprob that is absent, NaN or minus infinity."""


class VllmEngine:
    """One `vllm serve` replica."""

    def __init__(
        self,
        url: str,
        model: str,
        client: httpx.AsyncClient,
        *,
        api_key: str = "",
        key_source: str = "",
        patience_s: float = PATIENCE_S,
    ) -> None:
        root = url.rstrip("/").removesuffix("/v1")
        self._url = f"{root}/inference/v1/generate"
        self._model = model
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        name = engine_name("vllm", url)
        self._wire = Wire(name, client, headers, key_source=key_source, patience_s=patience_s)
        self.name = self._wire.name

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: dict[str, Any],
        *,
        session_id: str,
        request_id: str,
        labels: Mapping[str, str] = NO_LABELS,
    ) -> Completion:
        body = {
            "model": self._model,
            "request_id": request_id,
            "sampling_params": {**sampling, "logprobs": 1, "skip_special_tokens": False},
        }
        headers = {"x-session-id": session_id, "x-request-id": request_id}
        content = _with_ids(body, prompt_ids)
        return await self._wire.post(self._url, content, self._completion, headers)

    def _completion(self, answer: dict[str, Any]) -> Completion:
        choice = answer["choices"][0]
        reason = FinishReason(choice["finish_reason"])
        if reason is FinishReason.ABORT:
            # Half a turn is never recorded as a turn.
            raise self._wire.unavailable("the completion was aborted")
        token_ids = array("i", choice["token_ids"])
        if not token_ids:
            raise ValueError("no sampled token")
        logprobs = array("d", _logprobs(choice["logprobs"]["content"], token_ids))
        versions = _versions(choice.get("weight_versions") or (), len(token_ids))
        return Completion(token_ids, logprobs, reason, versions, self.name)


def _with_ids(body: dict[str, Any], prompt_ids: Sequence[int]) -> bytes:
    """The body as JSON; the ids' text is taken over where it is known already."""
    known = prompt_ids if isinstance(prompt_ids, PromptIds) else PromptIds.of(prompt_ids)
    head = json.dumps(body, separators=(",", ":")).encode().removesuffix(b"}")
    return b"".join([head, b',"token_ids":[', known.text, b"]}"])


def _logprobs(content: list[dict[str, Any]], token_ids: Sequence[int]) -> list[float]:
    """Raises: ValueError unless there is one finite logprob for each sampled id, in order."""
    if len(content) != len(token_ids):
        raise ValueError(f"{len(content)} logprobs for {len(token_ids)} sampled tokens")
    logprobs = [float(entry["logprob"]) for entry in content]
    for position, (entry, token_id) in enumerate(zip(content, token_ids, strict=True)):
        if _token_id(entry) not in (token_id, None):
            raise ValueError(f"logprob {position} belongs to another token than {token_id}")
    if any(not math.isfinite(value) or value == MISSING_LOGPROB for value in logprobs):
        raise ValueError("a logprob is missing")
    return logprobs


def _token_id(entry: dict[str, Any]) -> int | None:
    """vLLM names the token by `token_id`, or in older form by `token: "token_id:N"`."""
    token_id = entry.get("token_id")
    if token_id is None:
        _, found, number = str(entry.get("token", "")).partition("token_id:")
        token_id = int(number) if found else None
    return token_id


def _versions(spans: Sequence[dict[str, Any]], length: int) -> tuple[VersionSpan, ...]:
    """A label without a number (vLLM's unset label is `default`) names no policy version."""
    found: list[VersionSpan] = []
    for span in spans:
        number = re.search(r"\d+$", str(span["version"]))
        start, end = int(span["start"]), int(span["end"])
        if not 0 <= start <= end <= length:
            raise ValueError(f"version span {start}..{end} outside of {length} tokens")
        if number and end > start:
            found.append(VersionSpan(version=int(number[0]), start=start, end=end))
    return tuple(found)
