"""A client of vLLM's control routes: probes, metrics, pause, weights.

Only managers and gateways call these routes, directly on the engine. The gateway never exposes them.
"""

import contextlib
import errno
import hashlib
import json
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from perdure.engines.clients.sampled_tokens import check_ids, check_logprobs
from perdure.engines.engine_state import is_fenced, root_of
from perdure.errors import Boundary, ControlPlaneError

PROBE_S = 30.0
"""Seconds for a probe's answer. Busy engines are slow, so one slow answer proves nothing."""
REFUSALS = {400, 401, 403, 404, 405, 422}
PROBE_PROMPT = (1, 2, 3)
GREEDY: Mapping[str, float] = {"temperature": 0.0}
PROBE_SESSION = "perdure-probe"
TOKENIZED = "def naïve(x): return {'Straße': x ** 2048}  # 你好, мир 🙂"
"""A text that two different tokenizers are unlikely to split in the same way."""
LOCAL_ERRNOS = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),
    *(errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.ENETUNREACH),
    socket.EAI_AGAIN,
}
"""Errors that keep this process from connecting to anything, and so say nothing about the engine."""
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{([^}]*)\})?\s+(\S+)", re.MULTILINE)


class EngineSilent(ControlPlaneError):
    """The engine gave no answer. `gone`: no process listens at its address."""

    boundary = Boundary.ENGINE

    def __init__(self, message: str, *, gone: bool) -> None:
        super().__init__(message)
        self.gone = gone


class EngineRefused(ControlPlaneError):
    """The engine refused our request: a model that it does not serve, a wrong key, or a missing route."""

    boundary = Boundary.ENGINE


class WrongWeightLabel(ControlPlaneError):
    """The engine's weight label is a number that cannot be a policy version."""

    boundary = Boundary.ENGINE


@dataclass(frozen=True)
class Vitals:
    """What an engine's /metrics reports. None: not reported."""

    started: str = ""
    """Start time of its process, as text."""
    running: float = 0.0
    waiting: float = 0.0
    starved: float = 0.0
    """Requests that wait for room in the KV cache."""
    steps: float | None = None
    tokens: float | None = None
    preemptions: float = 0.0
    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    kv_tokens: int | None = None
    """Tokens that fit into the KV cache."""
    cache_queries: float = 0.0
    cache_hits: float = 0.0


class Served(NamedTuple):
    """One start of an engine, and its model."""

    start_id: str
    """Identifies this start: its fenced model name, or its process's start time."""
    root: str = ""
    """The model behind the name, as `/v1/models` reports it; empty if not reported."""


@dataclass(frozen=True)
class Scored:
    """The token after a prompt, and its logprob.

    `prompt_logprobs`: the logprobs of the prompt's tokens from the second on, [P - 1], if requested.
    """

    token_id: int
    logprob: float
    prompt_logprobs: Sequence[float] = ()


class EngineControl:
    """The control plane of one engine."""

    processed_by = "start vLLM with --logprobs-mode processed_logprobs"
    """How to make the engine report logprobs of the distribution that it sampled from."""

    def __init__(
        self,
        url: str,
        client: httpx.AsyncClient,
        *,
        api_key: str = "",
        probe_s: float = PROBE_S,
        vocabulary: int | None = None,
    ) -> None:
        """`vocabulary`: how many token ids the model has; None: not known."""
        self.url = root_of(url)
        self.vocabulary = vocabulary
        self._probe_s = probe_s
        self._client = client
        # After an engine's error, uvicorn answers and then closes the connection without announcing it.
        # A request on the reused connection would fail.
        self._headers = {"connection": "close"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def vitals(self) -> Vitals:
        """Raises: ControlPlaneError."""
        response = await self._send("GET", "/metrics", timeout=self._probe_s)
        return read_vitals(response.text)

    async def served(self, model: str, vitals: Vitals) -> Served:
        """Identify this start of the server and its model. Raises: ControlPlaneError."""
        response = await self._send("GET", "/v1/models", timeout=self._probe_s, absent_ok=True)
        try:
            roots = {
                str(card.get("id", "")): str(card.get("root") or "")
                for card in object_of(response).get("data", ())
            }
        except (TypeError, AttributeError) as error:
            raise self._failed(f"GET /v1/models lists no models: {error!r}") from error
        fenced = next((name for name in roots if is_fenced(model, name)), "")
        return Served(fenced or vitals.started, roots.get(fenced or model, ""))

    async def tokenizer(self, model: str, text: str = TOKENIZED) -> str:
        """A digest of the ids of a text, which identifies the tokenizer; empty if there is no answer."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            response = await self._send("POST", "/tokenize", body, timeout=self._probe_s)
        except ControlPlaneError:
            return ""
        return digest_of_ids(object_of(response).get("tokens"))

    async def round_trip(self, model: str, *, timeout_s: float = PROBE_S) -> None:
        """Prove readiness by sampling one token. Raises: ControlPlaneError."""
        await self.score(model, PROBE_PROMPT, timeout_s=timeout_s)

    async def score(
        self,
        model: str,
        prompt_ids: Sequence[int],
        *,
        prompt_logprobs: bool = False,
        sampling: Mapping[str, float] = GREEDY,
        timeout_s: float = PROBE_S,
    ) -> Scored:
        """The next token and its logprob; on request, also the logprobs of the prompt's tokens.

        Raises: ControlPlaneError.
        """
        sampling = {"max_tokens": 1, "logprobs": 1, **sampling}
        if prompt_logprobs:
            sampling = {**sampling, "prompt_logprobs": 0}
        body = {
            "model": model,
            "request_id": f"{PROBE_SESSION}-{secrets.token_hex(4)}",  # engines run a repeated id again
            "token_ids": list(prompt_ids),
            "sampling_params": sampling,
        }
        headers = {"x-session-id": PROBE_SESSION}
        route = "/inference/v1/generate"
        response = await self._send("POST", route, body, headers=headers, timeout=timeout_s)
        try:
            answer = object_of(response)
            choice = answer["choices"][0]
            entry = choice["logprobs"]["content"][0]
            forced = (
                [
                    float(found[str(token)]["logprob"])
                    for token, found in zip(
                        prompt_ids[1:], answer["prompt_logprobs"][1:], strict=True
                    )
                ]
                if prompt_logprobs
                else ()
            )
            token_id, logprob = choice["token_ids"][0], float(entry["logprob"])
            check_ids([token_id], self.vocabulary)
            check_logprobs([logprob])
            return Scored(token_id, logprob, forced)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._failed(f"sampled no token: {error!r}") from error

    async def is_paused(self) -> bool | None:
        """Whether it is paused; None if it has no such route, because it does not run in vLLM's dev mode."""
        response = await self._send("GET", "/is_paused", timeout=self._probe_s, absent_ok=True)
        return object_of(response).get("is_paused")

    async def version(self) -> int | None:
        """The number in its weight label; None if there is none. Raises: ControlPlaneError."""
        response = await self._send("GET", "/weight_info", timeout=self._probe_s, absent_ok=True)
        return self._version_of(response)

    def _version_of(self, response: httpx.Response) -> int | None:
        try:
            return version_number(object_of(response).get("weight_version"))
        except ValueError as error:
            raise WrongWeightLabel(self._told(str(error))) from None

    async def pause(self, mode: str) -> None:
        """Pause the engine. `abort` ends requests in flight with the tokens that they have; `keep` freezes
        them. Both clear the prefix cache, because new tokens must not attend to KV of the old weights."""
        await self._send("POST", f"/pause?mode={mode}&clear_cache=true", timeout=120.0)

    async def resume(self) -> None:
        await self._send("POST", "/resume", timeout=60.0)

    async def start_update(self) -> None:
        await self._send("POST", "/start_weight_update", timeout=600.0)

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        body = {"update_info": dict(info)}
        await self._send("POST", "/update_weights", body, timeout=1800.0)

    async def finish_update(self, version: int) -> None:
        body = {"weight_version": str(version)}
        await self._send("POST", "/finish_weight_update", body, timeout=600.0)

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Must be called once per start of the engine. Raises: ControlPlaneError."""
        body = {"init_info": dict(info)}
        await self._send("POST", "/init_weight_transfer_engine", body, timeout=600.0)

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout: float,
        headers: Mapping[str, str] | None = None,
        absent_ok: bool = False,
    ) -> httpx.Response:
        try:
            response = await self._client.request(
                method,
                self.url + path,
                json=None if body is None else dict(body),
                headers={**self._headers, **(headers or {})},
                timeout=httpx.Timeout(timeout, connect=5.0, pool=None),
            )
        except httpx.RequestError as error:
            gone = isinstance(error, httpx.ConnectError) and not _is_local(error)
            problem = f"{method} {path}: {type(error).__name__} {error}".strip()
            raise EngineSilent(self._told(problem), gone=gone) from None
        if response.is_success or (absent_ok and response.status_code in (404, 405)):
            return response
        said = " ".join(response.text[:300].split())
        problem = f"{method} {path} answered {response.status_code}: {said}"
        if response.status_code in REFUSALS:
            raise EngineRefused(self._told(problem))
        raise self._failed(problem)

    def _told(self, problem: str) -> str:
        return f"the engine {self.url} failed: {problem}"

    def _failed(self, problem: str) -> ControlPlaneError:
        return ControlPlaneError(self._told(problem), boundary=Boundary.ENGINE)


def _is_local(error: httpx.ConnectError) -> bool:
    """Whether only this process is the cause. Some of a host's addresses may be unreachable, as IPv6
    often is, but one that refuses the connection proves that the host answered."""
    found = _errnos(error)
    return bool(found) and found <= LOCAL_ERRNOS


def _errnos(error: BaseException | None) -> set[int]:
    """The errnos of an error and of all its causes."""
    found: set[int] = set()
    while error is not None:
        for one in getattr(error, "exceptions", (error,)):
            found |= {one.errno} if isinstance(one, OSError) and one.errno else set()
        error = error.__cause__ or error.__context__
    return found


def samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Name, labels and value of each line of /metrics. Skips the buckets of histograms, which are nine
    tenths of the text and which nothing reads."""
    read = "\n".join(line for line in text.split("\n") if "_bucket{" not in line)
    for name, labels, number in SAMPLE.findall(read):
        with contextlib.suppress(ValueError):
            yield name, labels, float(number)


def read_vitals(text: str) -> Vitals:
    """Sum over the engine's data-parallel ranks; the KV share is the fullest rank's."""
    sums: dict[str, float] = {}
    starved, kv_used, kv_tokens = 0.0, 0.0, 0
    for name, labels, value in samples(text):
        sums[name] = sums.get(name, 0.0) + value
        if name == "vllm:num_requests_waiting_by_reason" and 'reason="capacity"' in labels:
            starved += value
        elif name == "vllm:kv_cache_usage_perc":
            kv_used = max(kv_used, value)
        elif name == "vllm:cache_config_info":
            size = re.search(r'kv_cache_size_tokens="(\d+)"', labels)
            kv_tokens += int(size[1]) if size else 0
    started = sums.get("process_start_time_seconds")
    return Vitals(
        started="" if started is None else f"{started:.2f}",
        running=sums.get("vllm:num_requests_running", 0.0),
        waiting=sums.get("vllm:num_requests_waiting", 0.0),
        starved=starved,
        steps=sums.get("vllm:iteration_tokens_total_count"),
        tokens=sums.get("vllm:generation_tokens_total"),
        preemptions=sums.get("vllm:num_preemptions_total", 0.0),
        kv_used=kv_used,
        kv_tokens=kv_tokens or None,
        cache_queries=sums.get("vllm:prefix_cache_queries_total", 0.0),
        cache_hits=sums.get("vllm:prefix_cache_hits_total", 0.0),
    )


def version_number(label: object) -> int | None:
    """The version in a label: 7 for `step-7`, None for vLLM's unset label `default`. Raises: ValueError
    for `-7`."""
    if re.fullmatch(r"-\d+", str(label)):
        raise ValueError(f"the weight label {str(label)!r} is negative: not a policy version")
    found = re.search(r"\d+$", str(label))
    return int(found[0]) if found else None


def digest_of_ids(ids: Sequence[int] | None) -> str:
    """Empty if there are no ids."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:12] if ids else ""


def object_of(response: httpx.Response) -> dict[str, Any]:
    try:
        value = json.loads(response.content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) and response.is_success else {}
