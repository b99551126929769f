"""The client of the gateway's control API.

Activities import it, so it imports neither tokenizers nor the server.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from perdure.errors import ConfigurationError, GatewayUnavailable, NotFound, StoreUnavailable
from perdure.gateway.base import (
    STORE_UNAVAILABLE_CODE,
    SUMMARIES,
    SessionSpec,
    SessionSummary,
    control_token,
    session_key,
)
from perdure.gateway.gateway_addresses import CONNECT_S, Gateways
from perdure.gateway.status_batching import SummaryBatcher
from perdure.home_folder import Secrets

TIMEOUT_S = 60.0
"""Closing a session writes its turns to the store first."""


class GatewayControl:
    """Opens, reads and closes sessions. Every call can be repeated safely.

    Example:
        async with GatewayControl(settings.gateway_base_url, load_secrets(settings)) as control:
            await control.open(SessionSpec(session_id="try-1.click.0.0", turns_key="..."))
    """

    def __init__(
        self,
        base_url: str,
        secrets: Secrets,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`transport`: decides where requests go if `base_url` does not, such as `FailoverTransport`."""
        self._secrets = secrets
        self._url = base_url.rstrip("/")
        self._timeout = httpx.Timeout(timeout_s).as_dict()
        # No `httpx.AsyncClient`: its redirects and cookies take a quarter of a request's CPU time.
        self._transport = transport or httpx.AsyncHTTPTransport()
        self._looks = SummaryBatcher(self._summaries)

    async def __aenter__(self) -> "GatewayControl":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()

    def key(self, session_id: str) -> str:
        """The bearer token of a session, for its agent."""
        return session_key(self._secrets.newest, session_id)

    async def open(self, spec: SessionSpec) -> SessionSummary:
        """Open a session, or join it.

        Raises: GatewayUnavailable; ConfigurationError if it is open with another spec.
        """
        content = spec.model_dump_json().encode()
        return await self._call("PUT", f"/sessions/{spec.session_id}", content)

    async def get(self, session_id: str) -> SessionSummary:
        """Raises: GatewayUnavailable, NotFound."""
        return await self._call("GET", f"/sessions/{session_id}")

    async def look(self, session_id: str) -> SessionSummary:
        """Like `get`, but delayed by up to a second: one request serves all lookups of that second.

        Raises: GatewayUnavailable, StoreUnavailable, NotFound.
        """
        return await self._looks.look(session_id)

    async def stop(self, session_id: str) -> SessionSummary:
        """Let the gateway refuse the session's next calls, in every process.

        Raises: GatewayUnavailable, StoreUnavailable, NotFound.
        """
        return await self._call("POST", f"/sessions/{session_id}/stop")

    async def close(self, session_id: str) -> SessionSummary:
        """Seal a session and write its turns to the store.

        Raises: GatewayUnavailable, StoreUnavailable, NotFound.
        """
        return await self._call("POST", f"/sessions/{session_id}/close")

    async def write_turns(self, session_id: str) -> SessionSummary:
        """Write a session's turns to the store again, from its journal.

        Raises: GatewayUnavailable, StoreUnavailable; NotFound if its journal is gone or damaged.
        """
        return await self._call("POST", f"/sessions/{session_id}/turns")

    async def engines(self) -> dict[str, Any]:
        """The engines that this gateway knows, and how many calls wait for one.

        Raises: GatewayUnavailable.
        """
        document: dict[str, Any] = json.loads((await self._request("GET", "/engines")).content)
        return document

    async def forget(self, session_id: str) -> None:
        """Close a session that no attempt will replay, and delete its journal. Repeating is harmless.

        Raises: GatewayUnavailable, also if the gateway cannot reach the store.
        """
        await self._request("DELETE", f"/sessions/{session_id}")

    async def _summaries(self, session_ids: Sequence[str]) -> Mapping[str, SessionSummary]:
        content = json.dumps(session_ids).encode()
        answer = await self._request("POST", "/sessions", content)
        found = SUMMARIES.validate_json(answer.content)
        return {summary.session_id: summary for summary in found}

    async def _call(self, method: str, path: str, content: bytes = b"") -> SessionSummary:
        response = await self._request(method, path, content)
        return SessionSummary.model_validate_json(response.content)

    async def _request(self, method: str, path: str, content: bytes = b"") -> httpx.Response:
        request = httpx.Request(
            method,
            self._url + path,
            content=content,
            headers={"authorization": f"Bearer {control_token(self._secrets.newest)}"},
            extensions={"timeout": dict(self._timeout)},
        )
        try:
            response = await self._transport.handle_async_request(request)
            await response.aread()
        except httpx.TransportError as error:
            raise GatewayUnavailable(
                f"no answer from the gateway at {self._url}: {type(error).__name__}"
            ) from error
        if response.is_success:
            return response
        raise _failure(response)


class FailoverTransport(httpx.AsyncBaseTransport):
    """Sends each request to the first gateway that accepts a connection."""

    def __init__(self, gateways: Gateways) -> None:
        self._gateways = gateways
        self._transport = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        request.extensions.setdefault("timeout", {})["connect"] = CONNECT_S
        refused: httpx.TransportError | None = None
        for url in await self._gateways.urls():
            to = httpx.URL(url)
            request.url = request.url.copy_with(scheme=to.scheme, host=to.host, port=to.port)
            request.headers["host"] = to.netloc.decode()
            try:
                return await self._transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self._gateways.failed(url)
                refused = error
        assert refused is not None
        raise refused

    async def aclose(self) -> None:
        await self._transport.aclose()


def _failure(response: httpx.Response) -> Exception:
    status, message = response.status_code, _message(response)
    if status == httpx.codes.NOT_FOUND:
        return NotFound(message)
    if _code(response) == STORE_UNAVAILABLE_CODE:
        return StoreUnavailable(message)
    if status >= 500 or status == httpx.codes.TOO_MANY_REQUESTS:
        return GatewayUnavailable(f"the gateway answered {status}: {message}")
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        message += "; the workers and the gateway must share PERDURE_HOME or PERDURE_SECRET"
    return ConfigurationError(f"the gateway refused the call: {message}")


def _code(response: httpx.Response) -> str:
    try:
        body: Any = json.loads(response.content)
        return str(body["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def _message(response: httpx.Response) -> str:
    try:
        body: Any = json.loads(response.content)
        return str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
