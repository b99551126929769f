"""SGLang's native endpoint: token ids in; a stream of token ids, logprobs and weight versions out.

Written against the release SGLang 0.5.23, and never run against its GPU server. SGLang takes logprobs
after temperature and before top-p, top-k and min-p, so they are exact if these three are off. A server
with `--enable-return-routed-experts` returns the experts in the event with the finish reason. Owns one
stream of one engine. Requests name no model, so only the health check notices a restart.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from perdure.dialects.base import Refused
from perdure.engines.clients.sampled_tokens import ImpossibleTokens
from perdure.engines.clients.token_endpoint import (
    TOKENS_AN_EVENT,
    BreakKind,
    EngineRequest,
    StreamBroken,
    TokenServer,
    body_with_prompt,
    experts_of_int32,
    version_spans,
)
from perdure.engines.pool.token_salvage import Salvage
from perdure.types import FinishReason

RENAMED: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
SAME = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    }
)
ACCEPTED = SAME | set(RENAMED) | {"structured_outputs"}
"""vLLM's sampling fields that SGLang supports, under the same or another name."""
GRAMMARS: Mapping[str, str] = {"json": "json_schema", "regex": "regex", "grammar": "ebnf"}
"""Fields of `structured_outputs`, with SGLang's names."""
NO_ROOM = re.compile(
    r"maximum context length of (?P<context>\d+) tokens.*?(?P<prompt>\d+) tokens from the input",
    re.S,
)
"""SGLang's error if the prompt and `max_new_tokens` exceed the context. vLLM shortens the request
instead."""


class SglangEngine(TokenServer):
    """The native endpoint of one `sglang.launch_server`, with or without
    --incremental-streaming-output."""

    route = "/generate"

    async def sample(
        self, ask: EngineRequest, salvage: Salvage, version: Callable[[], int | None]
    ) -> FinishReason:
        """Stream a completion into `salvage`. `version`: the policy version known to be loaded now.

        Raises: StreamBroken (the tokens before it are in `salvage`), Refused.
        """
        options = sampling_params(self.name, ask.sampling)
        try:
            return await self._sample(ask, options, salvage, version)
        except Refused as refused:
            room = _room(str(refused))
            if room is None or options.get("max_new_tokens", 0) <= room:
                raise
            return await self._sample(ask, {**options, "max_new_tokens": room}, salvage, version)

    async def _sample(
        self,
        ask: EngineRequest,
        options: Mapping[str, Any],
        salvage: Salvage,
        version: Callable[[], int | None],
    ) -> FinishReason:
        headers = {"x-session-id": ask.session_id}
        taken = 0

        def take(event: dict[str, Any]) -> FinishReason | None:
            nonlocal taken
            if "error" in event:
                raise self._failed(event["error"], begun=taken > 0)
            new = new_tokens(event["meta_info"], taken)
            ids, logprobs = [entry[1] for entry in new], [float(entry[0]) for entry in new]
            ask.check(taken, ids, logprobs)
            salvage.add(ids, logprobs, version())
            taken += len(new)
            return self._end(event["meta_info"], salvage, ask)

        return await self._stream(_body(ask, options), headers, take)

    def _end(
        self, about: Mapping[str, Any], salvage: Salvage, ask: EngineRequest
    ) -> FinishReason | None:
        reason = about.get("finish_reason")
        if reason is None:
            return None
        if about.get("routed_experts"):
            rows = ask.count_rows(salvage.part)
            salvage.add_experts(experts_of_int32(about["routed_experts"], rows), rows)
        if reason["type"] == "abort":
            raise self._aborted(reason)
        salvage.report(version_spans(about.get("weight_versions") or (), salvage.part))
        if not salvage.ids:
            raise ValueError("no sampled token")
        return FinishReason(reason["type"])

    def _aborted(self, reason: Mapping[str, Any]) -> Exception:
        """The exception for an abort. A refusal by the scheduler has a status; other aborts have none."""
        status, message = reason.get("status_code"), str(reason.get("message") or "aborted")
        if isinstance(status, int):
            return self._refusal(status, json.dumps({"message": message}))
        return StreamBroken(BreakKind.ABORTED, "the completion was aborted")

    def _failed(self, error: object, *, begun: bool) -> Exception:
        told = error if isinstance(error, dict) else {}
        code, message = told.get("code"), str(told.get("message", error))
        if isinstance(code, int) and code < 500 and not begun:
            return self._refusal(code, json.dumps({"error": told}))
        return StreamBroken(BreakKind.LOST, f"the engine failed: {message[:300]}")


def sampling_params(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's sampling fields under SGLang's names. Raises: Refused for a field that SGLang lacks."""
    found: dict[str, Any] = {"skip_special_tokens": False, "max_new_tokens": None}
    for field, value in options.items():
        if field in RENAMED or field in SAME:
            found[RENAMED.get(field, field)] = value
        elif field == "structured_outputs":
            found |= _grammar(name, value)
        else:
            raise Refused(
                400,
                "engine_refused",
                f"the engine {name} does not support the sampling field {field!r}",
            )
    return found


def _grammar(name: str, outputs: Mapping[str, Any]) -> dict[str, Any]:
    for kind, ours in GRAMMARS.items():
        if outputs.get(kind) is not None:
            text = outputs[kind]
            return {ours: text if isinstance(text, str) else json.dumps(text)}
    raise Refused(
        400,
        "engine_refused",
        f"the engine {name} does not support structured outputs of {sorted(outputs)}",
    )


def _body(ask: EngineRequest, options: Mapping[str, Any]) -> bytes:
    body = {
        "rid": ask.request_id,
        "session_id": ask.session_id,
        "stream": True,
        "return_logprob": True,
        "return_routed_experts": True,
        "routed_experts_start_len": ask.routed_from,
        "sampling_params": {**options, "stream_interval": TOKENS_AN_EVENT},
    }
    return body_with_prompt(body, "input_ids", ask)


def new_tokens(about: Mapping[str, Any], taken: int) -> Sequence[Sequence[Any]]:
    """The entries `[logprob, id, text]` after the first `taken` ones. A chunk holds only new entries, or
    all entries so far.

    Raises: ImpossibleTokens if tokens are missing.
    """
    entries, total = about["output_token_logprobs"], int(about["completion_tokens"])
    first = total - len(entries)
    if not 0 <= first <= taken <= total:
        raise ImpossibleTokens(
            f"tokens are missing: {len(entries)} logprobs arrived for {total} sampled tokens, "
            f"after {taken} earlier ones"
        )
    found: Sequence[Sequence[Any]] = entries[taken - first :]
    return found


def _room(message: str) -> int | None:
    found = NO_ROOM.search(message)
    if found is None:
        return None
    left = int(found["context"]) - int(found["prompt"])
    return left - 1 if left > 1 else None
