"""The host's side of a relay: carries model requests of a sandbox that cannot reach the gateway.

Starts the relay inside (`relay_program`), reads its requests, asks the gateway and sends back the
answers. The sandbox and the gateway's journal hold everything that must survive this process, so
another worker can make the same `Relay` and continue.
"""

import asyncio
import base64
import contextlib
import hmac
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from importlib import resources
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import httpx
import structlog

from perdure.errors import (
    AgentError,
    Boundary,
    ConfigurationError,
    GatewayUnavailable,
    NotFound,
    PerdureError,
)
from perdure.sandboxes.base import Exec, Sandbox
from perdure.sandboxes.relay.relay_process import LARGEST_BODY, JsonObject, RelayProcess

PORT = 18001
RELAYED = "x-perdure-relayed"
"""Header of relayed requests, with the request's id: the same if it is sent again. Their connection does
not show whether the agent has hung up."""
AT_ONCE = 32
"""Requests of one sandbox that wait for the gateway at a time."""
MOST_REQUESTS = 128
"""Requests of one sandbox that are kept at a time. An honest relay has at most half as many."""
MOST_STARTS = 20
READY_S = 60.0
FLUSH_S = 0.25
"""Seconds that a part of an answer waits for more: each piece costs a request to the provider."""
PIECE = 1 << 20
"""Bytes at which a part is sent without waiting."""
LARGEST_ANSWER = 64 << 20
GATEWAY_RETURNS_S = 30.0
"""Seconds that requests wait for a gateway that restarts; then they are answered with 503."""

_REQUEST_ID = re.compile(r"[0-9a-f]{32}")
_METHOD = re.compile(r"[A-Z]{1,10}")
_PATH = re.compile(r"/(v1(beta)?/[!-~]{0,4000}|api/hello|healthz)?")
_HOP = {
    "connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding",
    "upgrade",
}  # fmt: skip
_KEYS = {"authorization", "x-api-key", "x-goog-api-key"}

_FIND_PYTHON = (
    "for p in python3 python /usr/libexec/platform-python; do "
    'command -v "$p" >/dev/null 2>&1 && exec "$p" "$0" "$@"; done; '
    "echo 'no python3 in this image' >&2; exit 127"
)

log = structlog.get_logger()


class _AgentRequest:
    """One request of the agent. The gateway gets it once; the answer is kept until it arrives."""

    def __init__(self, line: JsonObject) -> None:
        self.line = line
        self.pieces: list[tuple[JsonObject, bytes]] = []
        self.size = 0
        self.task: asyncio.Task[None]


class Relay:
    """Serves one sandbox while it is entered. Leaving it does not end the relay inside.

    Example:
        async with Relay(sandbox, gateway_url=url, session_key=key) as relay:
            ...  # relay.url is the gateway's address inside
            relay.check()

    Raises on entering: ConfigurationError when the image has no Python 3.8 or later, AgentError,
    GatewayUnavailable when no round trip succeeds, SandboxLost.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        gateway_url: str,
        session_key: str,
        output_mb: int = 64,
        reads_are_cheap: bool = False,
        again_s: float = 30.0,
    ) -> None:
        """`reads_are_cheap`: a read from the sandbox is a system call, not a request to a service.
        `output_mb`: the sandbox's limit, of which the relay uses a part. `again_s`: seconds after
        which the relay asks again for an answer."""
        self.url = ""
        self._sandbox = sandbox
        self._key = session_key
        self._reads_are_cheap = reads_are_cheap
        self._inline = min(8 << 20, output_mb << 18)
        self._again_s = again_s
        self._spool = f"{sandbox.tmp}/.perdure-{sandbox.identity}"
        self._gateway = httpx.AsyncClient(
            base_url=gateway_url,
            timeout=httpx.Timeout(None, connect=10),
            limits=httpx.Limits(max_connections=AT_ONCE),
            trust_env=False,
        )
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._requests: dict[str, _AgentRequest] = {}
        self._process: RelayProcess
        self._port = 0
        self._ready = asyncio.Event()
        self._serving: asyncio.Task[None]

    async def __aenter__(self) -> Self:
        self._serving = asyncio.create_task(self._serve())
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait(
                [ready, self._serving], timeout=READY_S, return_when="FIRST_COMPLETED"
            )
            self.check()
            if not self._ready.is_set():
                raise GatewayUnavailable(
                    "gateway.reach = stdio: no answer from the gateway reached sandbox "
                    f"{self._sandbox.identity} within {READY_S:.0f} s"
                )
        except BaseException:
            await self.aclose()
            raise
        finally:
            ready.cancel()
        self.url = f"http://127.0.0.1:{self._port}"
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        self._serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, PerdureError):
            await self._serving
        self._forget()
        await self._gateway.aclose()

    def check(self) -> None:
        """Raise the error that stopped the relay, if one did."""
        if self._serving.done():
            self._serving.result()

    # -- the relay inside -----------------------------------------------------------------------

    async def _serve(self) -> None:
        number = await self._newest()
        while number <= MOST_STARTS:
            await self._start(number)
            async for batch in self._process.batches():
                self._hear(batch)
            await self._explain_early_end(number)
            self._forget()
            number += 1
        raise AgentError(
            f"the relay to the gateway ended {MOST_STARTS} times in sandbox "
            f"{self._sandbox.identity}",
            boundary=Boundary.SANDBOX,
        )

    async def _newest(self) -> int:
        """The number of the relay that an earlier watcher left running, or 1."""
        for number in range(1, MOST_STARTS + 1):
            try:
                await self._sandbox.poll(exec_id_of(number + 1))
            except NotFound:
                return number
        return MOST_STARTS

    async def _start(self, number: int) -> None:
        exec_id = exec_id_of(number)
        program, sandbox = f"{self._spool}/relay.py", self._sandbox
        await sandbox.put(program, _program())
        argv = ["sh", "-c", _FIND_PYTHON, program, "--spool", self._spool, "--port", str(PORT)]
        argv += ["--inline-budget", str(self._inline), "--again-s", str(self._again_s)]
        await sandbox.start(exec_id, Exec(argv, cwd="/"))
        self._process = RelayProcess(
            sandbox, exec_id, self._spool, reads_are_cheap=self._reads_are_cheap
        )

    async def _explain_early_end(self, number: int) -> None:
        """Raise if the relay never wrote a line, because the next one would not either."""
        if self._port:
            log.warning(
                "the relay ended; starting it again", sandbox=self._sandbox.identity, number=number
            )
            return
        exec_id = exec_id_of(number)
        status = await self._sandbox.poll(exec_id)
        said = (await self._sandbox.output(exec_id, "stderr"))[-300:].decode("utf-8", "replace")
        last = said.strip().splitlines()[-1:] or ["nothing"]
        raise ConfigurationError(
            "gateway.reach = stdio: the relay needs python3 (3.8 or later) in the sandbox, "
            f"and ended with {status.code if status.code is not None else status.cause} "
            f"({last[0]}); add python3 to the image, or set PERDURE_GATEWAY__REACH=url with an "
            "address that the sandbox can open"
        )

    # -- requests -------------------------------------------------------------------------------

    def _hear(self, batch: Sequence[JsonObject]) -> None:
        done = {line["done"] for line in batch if isinstance(line.get("done"), str)}
        for request_id in done:
            if (request := self._requests.pop(request_id, None)) is not None:
                request.task.cancel()
        for line in batch:
            if isinstance(line.get("port"), int) and 0 < line["port"] < 65536:
                self._port = line["port"]
            elif "healthy" in line and self._port:
                self._ready.set()
            elif isinstance(line.get("again"), str):
                self._send_again(line["again"])
            elif is_request(line) and line["id"] not in done:
                self._take(line)

    def _take(self, line: JsonObject) -> None:
        request_id = line["id"]
        if request_id in self._requests or len(self._requests) >= MOST_REQUESTS:
            return
        request = self._requests[request_id] = _AgentRequest(line)
        request.task = asyncio.create_task(self._answer(request))

    def _send_again(self, request_id: str) -> None:
        """Send the recorded answer again; the model is not called again."""
        request = self._requests.get(request_id)
        if request is not None and request.task.done():
            request.task = asyncio.create_task(self._resend(request))
        elif request is not None and request.pieces:
            request.task = asyncio.create_task(self._resend(request, request.task))

    async def _resend(
        self, request: _AgentRequest, first: "asyncio.Task[None] | None" = None
    ) -> None:
        try:
            if first is not None:
                await first
            for head, body in [*request.pieces]:
                await self._process.answer(head, body)
        except asyncio.CancelledError:
            if first is not None:
                first.cancel()
            raise

    def _forget(self) -> None:
        for request in self._requests.values():
            request.task.cancel()
        self._requests.clear()

    async def _answer(self, request: _AgentRequest) -> None:
        try:
            async with self._slots:
                body = await self._body(request.line)
                if body is not None:
                    await self._ask(request, body)
        except PerdureError as error:  # the serving task fails with it too, and raises it
            log.warning("cannot give the relay an answer", error=str(error))

    async def _body(self, line: JsonObject) -> bytes | None:
        if "size" not in line:
            try:
                return base64.b64decode(line.get("body", ""), validate=True)
            except (ValueError, TypeError):
                return None
        body = await self._process.fetch(line["id"])
        return None if body is None or len(body) > LARGEST_BODY else body

    async def _ask(self, request: _AgentRequest, body: bytes) -> None:
        """Ask until the gateway has begun to answer. It recognizes a repeated request."""
        line, try_id = request.line, uuid4().hex[:8]
        if not _PATH.fullmatch(line["path"]) or ".." in line["path"]:
            return await self._tell(request, try_id, 404, f"no route {line['path'][:100]}")
        until = asyncio.get_running_loop().time() + GATEWAY_RETURNS_S
        while True:
            try:
                http_request = self._gateway.build_request(
                    line["method"], line["path"], headers=self._headers(line), content=body
                )
                return await self._pass_on(request, try_id, http_request)
            except httpx.TransportError as error:
                if request.pieces:
                    return await self._send(request, try_id, {"broken": True, "end": True}, b"")
                if asyncio.get_running_loop().time() > until:
                    return await self._tell(request, try_id, 503, f"no gateway: {error!r}")
                await asyncio.sleep(0.1)

    def _headers(self, line: JsonObject) -> list[tuple[str, str]]:
        """The agent's headers, without keys other than this session's."""
        kept = [
            (name, value)
            for name, value in line["headers"]
            if name.lower() not in {*_HOP, RELAYED}
            and (name.lower() not in _KEYS or self._is_key(value))
        ]
        return [*kept, (RELAYED, line["id"])]

    def _is_key(self, value: str) -> bool:
        given = value.removeprefix("Bearer ").removeprefix("bearer ").strip()
        return hmac.compare_digest(given.encode("utf-8", "replace"), self._key.encode())

    async def _pass_on(
        self, request: _AgentRequest, try_id: str, http_request: httpx.Request
    ) -> None:
        response = await self._gateway.send(http_request, stream=True)
        try:
            head: JsonObject = {
                "status": response.status_code,
                "headers": [
                    [name.decode("latin-1"), value.decode("latin-1")]
                    for name, value in response.headers.raw
                    if name.decode("latin-1").lower() not in _HOP
                ],
            }
            async with contextlib.aclosing(_pieces(response.aiter_raw())) as pieces:
                async for piece, is_last in pieces:
                    end = {"end": True} if is_last else {}
                    await self._send(request, try_id, {**head, **end}, piece)
                    head = {}
        finally:
            await response.aclose()

    async def _tell(self, request: _AgentRequest, try_id: str, status: int, message: str) -> None:
        body = httpx.Response(status, json={"error": {"type": "relay", "message": message}})
        headers = [["content-type", "application/json"]]
        if status == 503:
            headers.append(["retry-after", "5"])
        head = {"status": status, "headers": headers, "end": True}
        await self._send(request, try_id, head, body.content)

    async def _send(
        self, request: _AgentRequest, try_id: str, head: JsonObject, body: bytes
    ) -> None:
        request.size += len(body)
        if request.size > LARGEST_ANSWER:
            head, body = {"broken": True, "end": True}, b""
        whole = {"id": request.line["id"], "try": try_id, "seq": len(request.pieces), **head}
        request.pieces.append((whole, body))
        await self._process.answer(whole, body)


async def _pieces(parts: AsyncIterator[bytes]) -> AsyncGenerator[tuple[bytes, bool], None]:
    """Joins parts that follow each other within FLUSH_S, up to PIECE bytes. True: the last.

    The first piece comes within FLUSH_S, perhaps empty: the agent sees the head of its answer."""
    held, has_begun = b"", False
    coming = asyncio.ensure_future(anext(parts, b""))
    try:
        while True:
            await asyncio.wait([coming], timeout=FLUSH_S if held or not has_begun else None)
            if coming.done():
                if not (part := coming.result()):
                    yield held, True
                    return
                held, coming = held + part, asyncio.ensure_future(anext(parts, b""))
                if len(held) < PIECE:
                    continue
            yield held, False
            held, has_begun = b"", True
    finally:
        coming.cancel()


def exec_id_of(number: int) -> str:
    """The exec id of a sandbox's n-th relay."""
    return f"relay-stdio-{number}"


def is_request(line: JsonObject) -> bool:
    """Whether the line is a request as the relay writes it. A hostile sandbox may write anything."""
    headers = line.get("headers")
    return (
        _matches(_REQUEST_ID, line.get("id"))
        and _matches(_METHOD, line.get("method"))
        and isinstance(line.get("path"), str)
        and isinstance(line.get("size", 0), int)
        and isinstance(headers, list)
        and len(headers) <= 100
        and all(map(_is_header, headers))
    )


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_header(pair: Any) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(text, str) and text.isascii() and text.isprintable() for text in pair)
        and bool(re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}", pair[0]))
    )


def _program() -> bytes:
    return (resources.files("perdure.sandboxes.relay.in_sandbox") / "relay_program.py").read_bytes()
