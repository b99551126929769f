"""The Kubernetes API as the provider calls it: calls on pods, and commands in them.

Owns the client (one per event loop, by `KUBECONFIG` or from within the cluster) and the WebSocket of
a command. Answers are read as plain JSON, so that any version of the API can be read.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from perdure.errors import ConfigurationError
from perdure.sandboxes.providers.kubernetes import kubernetes_errors
from perdure.settings import process_environment

T = TypeVar("T")

CONTAINER = "sandbox"
PROTOCOL = "v4.channel.k8s.io"
"""Every cluster in use speaks it. It cannot end standard input, which is not needed here."""
STDIN, STDOUT, STDERR, STATUS = 0, 1, 2, 3
PIECE = 32 << 10
PAGE = 500


class CommandOutput(NamedTuple):
    """What a command printed. `status`: the API's report of its end; None if the socket was cut."""

    out: bytes
    err: bytes
    status: Mapping[str, Any] | None

    @property
    def code(self) -> int | None:
        """The exit code, if there is one."""
        if self.status is None:
            return None
        if self.status.get("status") == "Success":
            return 0
        causes = self.status.get("details", {}).get("causes") or ()
        codes = [cause["message"] for cause in causes if cause.get("reason") == "ExitCode"]
        return int(codes[0]) if codes else None

    @property
    def words(self) -> str:
        said = self.out[-300:] + b" " + self.err[-300:]
        message = "" if self.status is None else str(self.status.get("message", ""))
        return f"{said.decode('utf-8', 'replace').strip()} {message}".strip()


@dataclass(frozen=True)
class PodApi:
    """Calls on the pods of one namespace. Each may take `request_s` seconds."""

    api: Any
    sockets: Any
    namespace: str
    request_s: float

    async def create(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        return await self._json(_core(self.api).create_namespaced_pod, self.namespace, pod)

    async def read(self, name: str) -> dict[str, Any]:
        return await self._json(_core(self.api).read_namespaced_pod, name, self.namespace)

    async def delete(self, name: str, grace_s: int) -> dict[str, Any]:
        """Its processes get `grace_s` seconds to end; 0: the API removes it without its node."""
        call = _core(self.api).delete_namespaced_pod
        return await self._json(call, name, self.namespace, grace_period_seconds=grace_s)

    async def annotate(self, name: str, annotations: Mapping[str, str]) -> dict[str, Any]:
        body = {"metadata": {"annotations": dict(annotations)}}
        call = _core(self.api).patch_namespaced_pod
        kind = "application/merge-patch+json"
        return await self._json(call, name, self.namespace, body, _content_type=kind)

    async def listed(self, selector: str) -> list[dict[str, Any]]:
        """Every pod that the label selector selects, a page at a time."""
        found: list[dict[str, Any]] = []
        following = ""
        while True:
            options = {"_continue": following} if following else {}
            page = await self._json(
                _core(self.api).list_namespaced_pod,
                self.namespace,
                label_selector=selector,
                limit=PAGE,
                **options,
            )
            found += page["items"]
            following = page.get("metadata", {}).get("continue") or ""
            if not following:
                return found

    async def run(
        self, name: str, argv: Sequence[str], given: Sequence[bytes | Path], seconds: float
    ) -> CommandOutput:
        """Run a command in the pod to its end. The command must know the length of `given`, because
        its standard input does not end.

        Raises: TimeoutError; aiohttp's and the system's errors.
        """
        said = {STDOUT: bytearray(), STDERR: bytearray(), STATUS: bytearray()}
        async with asyncio.timeout(seconds):
            connecting = await _core(self.sockets).connect_get_namespaced_pod_exec(
                *(name, self.namespace),
                command=list(argv),
                container=CONTAINER,
                stdin=True,
                stdout=True,
                stderr=True,
                tty=False,
                _preload_content=False,
                _headers={"sec-websocket-protocol": PROTOCOL},
            )
            async with connecting as socket:
                sending = asyncio.create_task(_send(socket, given))
                try:
                    async for message in socket:
                        if isinstance(message.data, bytes) and message.data:
                            said.setdefault(message.data[0], bytearray()).extend(message.data[1:])
                        if said[STATUS]:
                            break
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
        status = json.loads(said[STATUS]) if said[STATUS] else None
        return CommandOutput(bytes(said[STDOUT]), bytes(said[STDERR]), status)

    async def log(self, name: str, container: str, *, lines: int, previous: bool) -> str:
        """The last lines of a container's output. `previous`: of the one before its last restart."""
        options = {"container": container, "tail_lines": lines, "previous": previous}
        return await self._text(
            _core(self.api).read_namespaced_pod_log, name, self.namespace, **options
        )

    async def _json(self, call: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await self._text(call, *arguments, **options))
        return found

    async def _text(self, call: Any, *arguments: Any, **options: Any) -> str:
        """Raises: ErrorAnswer; TimeoutError; aiohttp's errors."""
        async with asyncio.timeout(self.request_s):
            answer = await call(*arguments, _preload_content=False, **options)
            async with answer:
                text: str = await answer.text(errors="replace")
        if answer.status >= 300:
            raise kubernetes_errors.refused_of(answer.status, text, answer.headers)
        return text


def _core(client: Any) -> Any:
    """Untyped: its types describe decoded answers, but we read raw ones."""
    from kubernetes_asyncio.client import CoreV1Api

    return CoreV1Api(client)


async def _send(socket: Any, given: Sequence[bytes | Path]) -> None:
    for part in given:
        if isinstance(part, bytes):
            for at in range(0, len(part), PIECE):
                await socket.send_bytes(bytes([STDIN]) + part[at : at + PIECE])
            continue
        with part.open("rb") as file:
            while piece := await asyncio.to_thread(file.read, PIECE):
                await socket.send_bytes(bytes([STDIN]) + piece)


# -- the client -----------------------------------------------------------------------------------


@dataclass
class _Clients:
    """The clients of one event loop and cluster. Both read the same credentials at each call."""

    api: Any
    sockets: Any
    closing: AsyncIterator[None]
    reading: asyncio.Lock
    last_read_at: float


_clients: dict[tuple[Any, ...], _Clients] = {}


async def pod_api(context: str, namespace: str, request_s: float) -> PodApi:
    """Calls by this loop's clients, which are made at the first call and closed with the loop.

    Raises: ConfigurationError when no cluster is configured.
    """
    place = _place(context)
    if place not in _clients:
        await asyncio.to_thread(_import)  # it takes seconds, and heartbeats must continue
        configuration = await _configuration(context)
        if place not in _clients:
            await _make(configuration, place)
    found = _clients[place]
    return PodApi(found.api, found.sockets, namespace, request_s)


async def renew_credentials(context: str) -> None:
    """Read the credentials again, because a kubeconfig program's tokens last minutes. Running calls
    continue.

    Raises: ConfigurationError when they cannot be read.
    """
    found = _clients[_place(context)]
    async with found.reading:
        # of many calls that were refused, only the first reads them
        if time.monotonic() - found.last_read_at > kubernetes_errors.REFUSAL_PASSES_S / 2:
            await _read_credentials(found.api.configuration, context)
            found.last_read_at = time.monotonic()


def configured() -> str:
    """The kubeconfig files; empty when running in a cluster. Raises: ConfigurationError."""
    if named := process_environment.foreign("KUBECONFIG"):
        return named
    own = Path("~/.kube/config").expanduser()
    if own.exists():
        return str(own)
    if process_environment.foreign("KUBERNETES_SERVICE_HOST"):
        return ""
    raise ConfigurationError(
        "no Kubernetes cluster is configured: set KUBECONFIG, or run the worker within the cluster"
    )


def _place(context: str) -> tuple[Any, ...]:
    return asyncio.get_running_loop(), process_environment.foreign("KUBECONFIG"), context


def _import() -> None:
    import kubernetes_asyncio.client
    import kubernetes_asyncio.config
    import kubernetes_asyncio.stream  # noqa: F401


async def _configuration(context: str) -> Any:
    from kubernetes_asyncio.client import Configuration

    made = Configuration()
    made.connection_pool_maxsize = 0  # no limit: each running command holds a connection
    await _read_credentials(made, context)
    return made


async def _read_credentials(made: Any, context: str) -> None:
    """Read the credentials into the configuration that the clients use."""
    from kubernetes_asyncio import config

    files = configured()
    try:
        if files:
            await config.load_kube_config(files, context or None, made, persist_config=False)
        else:
            config.load_incluster_config(made)  # type: ignore[no-untyped-call]  # untyped there
    except Exception as error:  # for a wrong file, the reader raises any error
        raise _unreadable(error) from error
    if made.proxy and not str(made.proxy).startswith(("http://", "https://")):
        raise ConfigurationError(  # the URL is not shown, because it may hold a password
            "proxy-url of KUBECONFIG must begin with http:// or https://; no other kind of proxy is supported"
        )


def _unreadable(error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"the Kubernetes credentials cannot be read: {error}; correct KUBECONFIG or "
        "PERDURE_KUBERNETES__CONTEXT"
    )


async def _make(configuration: Any, place: tuple[Any, ...]) -> None:
    from kubernetes_asyncio.client import ApiClient
    from kubernetes_asyncio.stream import WsApiClient

    try:
        api, sockets = ApiClient(configuration), WsApiClient(configuration)
    except (OSError, ValueError) as error:  # the certificates are read here
        raise _unreadable(error) from error
    client: Any = sockets.rest_client
    client.pool_manager = _Session(client)
    closing = _close_with_loop(api, sockets, place)
    _clients[place] = _Clients(api, sockets, closing, asyncio.Lock(), 0.0)
    await anext(closing)


class _Session:
    """Opens sockets with the client's proxy and TLS name, which the client itself does not pass on."""

    def __init__(self, client: Any) -> None:
        self._session = client.pool_manager
        self._way = {
            "proxy": client.proxy,
            "proxy_headers": client.proxy_headers,
            "server_hostname": client.server_hostname,
        }

    def ws_connect(self, url: str, **options: Any) -> Any:
        return self._session.ws_connect(url, **self._way, **options)

    async def close(self) -> None:
        await self._session.close()


async def _close_with_loop(api: Any, sockets: Any, place: tuple[Any, ...]) -> AsyncIterator[None]:
    """The loop closes every unfinished generator before it ends."""
    try:
        yield
    finally:
        _clients.pop(place, None)
        await api.close()
        await sockets.close()
