"""vLLM's token endpoint: token ids in; a stream of token ids, logprobs and weight versions out.

The server must run with `--enable-scale-out`, and with `--logprobs-mode processed_logprobs`, so that
logprobs belong to the distribution that was sampled from. With `--enable-return-routed-experts`, the
event with the finish reason also has the experts. With `--return-sampling-mask` (vLLM 0.28 or later),
the event with a token also has the tokens that top-p and top-k left for it. Owns one stream of one
engine. The pool chooses the engine and handles a broken stream.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure.engines.clients.sampled_tokens import ImpossibleTokens
from perdure.engines.clients.token_endpoint import (
    PREEMPTIONS,
    TOKENS_AN_EVENT,
    BreakKind,
    EngineRequest,
    StreamBroken,
    TokenServer,
    body_with_prompt,
    experts_of_npy,
    version_spans,
)
from perdure.engines.pool.token_salvage import Salvage
from perdure.types import FinishReason

MISSING_LOGPROB = -9999.0
"""vLLM's placeholder for a logprob that is missing, NaN or minus infinity."""
FENCED = re.compile(r"-g\d+$")
DEATH = "EngineDead"


class VllmEngine(TokenServer):
    """The token endpoint of one `vllm serve` replica."""

    route = "/inference/v1/generate"

    async def sample(
        self, ask: EngineRequest, salvage: Salvage, version: Callable[[], int | None]
    ) -> FinishReason:
        """Stream a completion into `salvage`. `version`: the policy version known to be loaded now.

        Raises: StreamBroken (the tokens before it are in `salvage`), Refused.
        """
        headers = {"x-session-id": ask.session_id, "x-request-id": ask.request_id}

        def take(event: dict[str, Any]) -> FinishReason | None:
            return self._take(event, salvage, version, ask)

        return await self._stream(_body(ask), headers, take, fence=ask.model)

    def _take(
        self,
        event: dict[str, Any],
        salvage: Salvage,
        version: Callable[[], int | None],
        ask: EngineRequest,
    ) -> FinishReason | None:
        """Take one chunk. Only a finish reason ends a completion; `[DONE]` also ends crashed streams."""
        if "error" in event:
            raise self._failed(event["error"], begun=salvage.part > 0)
        # A server with several names reports the first one, so only a fenced name tells starts apart.
        if event.get("model") not in (None, ask.model) and FENCED.search(ask.model):
            raise StreamBroken(
                BreakKind.FENCED, f"{event['model']} answered instead of {ask.model}"
            )
        if not event.get("choices"):
            return None
        choice = event["choices"][0]
        token_ids = choice.get("token_ids") or []
        if token_ids:
            logprobs = _logprobs((choice.get("logprobs") or {}).get("content") or (), token_ids)
            ask.check(salvage.part, token_ids, logprobs)
            kept = choice.get("sampling_mask") if ask.truncates else None
            salvage.add(token_ids, logprobs, version(), kept)
        spans = choice.get("weight_versions") or ()
        salvage.report(version_spans(spans, salvage.part))
        if choice.get("finish_reason") is None:
            return None
        salvage.add_preemptions(choice.get(PREEMPTIONS))
        if choice.get("routed_experts"):
            salvage.add_experts(
                experts_of_npy(choice["routed_experts"]), ask.count_rows(salvage.part)
            )
        reason = FinishReason(choice["finish_reason"])
        if reason is FinishReason.ABORT:
            raise StreamBroken(BreakKind.ABORTED, "the completion was aborted")
        if not salvage.ids:
            raise ValueError("no sampled token")
        _check_count(salvage.part, spans, event.get("usage") or {})
        return reason

    def _failed(self, error: object, *, begun: bool) -> Exception:
        """The exception for an error event. vLLM sends one after a 200 if it refuses a request, and if it
        dies."""
        told = error if isinstance(error, dict) else {}
        code, message = told.get("code"), str(told.get("message", error))
        if isinstance(code, int) and code < 500 and not begun and DEATH not in message:
            return self._refusal(code, json.dumps({"error": told}))
        return StreamBroken(BreakKind.LOST, f"the engine failed: {message[:300]}")


def _body(ask: EngineRequest) -> bytes:
    """The request as JSON. vLLM ignores sampling parameters that it does not know."""
    wanted = {"logprobs": 1, "skip_special_tokens": False, "stream_interval": TOKENS_AN_EVENT}
    if ask.routed_from:
        wanted["routed_experts_prompt_start"] = ask.routed_from
    body = {
        "model": ask.model,
        "request_id": ask.request_id,
        "stream": True,
        "sampling_params": {**ask.sampling, **wanted},
    }
    return body_with_prompt(body, "token_ids", ask)


def _check_count(tokens: int, spans: Sequence[Mapping[str, Any]], usage: Mapping[str, Any]) -> None:
    """Detect a lost or repeated event by the engine's own count of tokens.

    Raises: ImpossibleTokens.
    """
    counted = usage.get("completion_tokens")
    if counted is None and spans:
        counted = spans[-1]["end"]
    if counted not in (None, tokens):
        raise ImpossibleTokens(f"{tokens} tokens arrived, but the engine counted {counted}")


def _logprobs(content: Sequence[dict[str, Any]], token_ids: Sequence[int]) -> list[float]:
    """Raises: ImpossibleTokens unless there is one logprob for each sampled id, in order."""
    if len(content) != len(token_ids):
        raise ImpossibleTokens(f"{len(content)} logprobs for {len(token_ids)} sampled tokens")
    logprobs: list[float] = []
    for entry, token_id in zip(content, token_ids, strict=True):
        value = float(entry["logprob"])
        if _token_id(entry) not in (token_id, None):
            raise ImpossibleTokens(f"logprob {len(logprobs)} does not belong to token {token_id}")
        if value == MISSING_LOGPROB:
            raise ImpossibleTokens("a logprob is missing")
        logprobs.append(value)
    return logprobs


def _token_id(entry: dict[str, Any]) -> int | None:
    """The token of an entry. vLLM names it by `token_id`; older versions by `token: "token_id:N"`."""
    token_id = entry.get("token_id")
    if token_id is None:
        _, found, number = str(entry.get("token", "")).partition("token_id:")
        token_id = int(number) if found else None
    return token_id
