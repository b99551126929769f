"""Failures of the Daytona SDK, typed by what to do next; and its one client per event loop.

Only the asynchronous client is used: the synchronous one sends a command again after a drop.
"""

import asyncio
import os
import re
import time
import warnings
from collections.abc import AsyncIterator, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.errors import ConfigurationError, ControlPlaneError, PerdureError, RateLimited
from perdure.sandboxes.guest.calls import Conflict, Missing

if TYPE_CHECKING:
    from daytona import AsyncDaytona

REFUSAL_PASSES_S = 6.5
"""The proxy caches a refused key for 5 s: asking sooner meets the cached refusal."""
RELEASE_S = 10.0
"""Between tries to boot while the account's quota is in use."""
QUOTA = re.compile(r"Total \w+ limit exceeded|quota", re.IGNORECASE)
NOT_NOW = re.compile(r"valid state|is not running|in progress|failed to convert exit code")

NAMES = (
    "DAYTONA_API_KEY", "DAYTONA_API_URL", "DAYTONA_JWT_TOKEN", "DAYTONA_ORGANIZATION_ID",
    "DAYTONA_TARGET",
)  # fmt: skip

_clients: (
    "dict[tuple[asyncio.AbstractEventLoop, str, str], tuple[AsyncDaytona, AsyncIterator[None]]]"
)
_clients = {}


async def client() -> "AsyncDaytona":
    """This loop's client, made at the first call and closed with the loop.

    Raises: ConfigurationError when a `.env` file here would say what the environment does not.
    """
    environment = {name: os.environ.get(name, "") for name in NAMES}
    loop = asyncio.get_running_loop()
    place = (loop, environment["DAYTONA_API_URL"], environment["DAYTONA_API_KEY"])
    if place not in _clients:
        await asyncio.to_thread(_import)  # takes seconds, in which heartbeats must go on
    if place not in _clients:
        made = _make(environment)
        closing = _close_with_loop(made, place)
        _clients[place] = made, closing
        await anext(closing)
    return _clients[place][0]


def _import() -> None:
    """Models are built here, once: two first uses at a time see them half built."""
    import daytona
    import daytona_api_client_async as api
    import daytona_toolbox_api_client_async as toolbox

    for model in (
        daytona.CreateSandboxFromImageParams, daytona.CreateSandboxFromSnapshotParams,
        api.CreateBuildInfo, api.CreateSandbox,
        api.ListSandboxesResponse, api.PortPreviewUrl, api.Sandbox, api.SandboxListItem,
        toolbox.ExecuteRequest, toolbox.ExecuteResponse,
    ):  # fmt: skip
        model.model_rebuild()


def _make(environment: Mapping[str, str]) -> "AsyncDaytona":
    from daytona import AsyncDaytona, DaytonaConfig

    if surprise := unread_file(Path.cwd()):
        raise ConfigurationError(surprise)
    config = DaytonaConfig(
        api_key=environment["DAYTONA_API_KEY"] or None,
        api_url=environment["DAYTONA_API_URL"] or None,
        jwt_token=environment["DAYTONA_JWT_TOKEN"] or None,
        organization_id=environment["DAYTONA_ORGANIZATION_ID"] or None,
        target=environment["DAYTONA_TARGET"] or None,
        use_deprecated_polling=True,  # no event socket: what it tells is asked for by us anyway
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return AsyncDaytona(config)


async def _close_with_loop(
    made: "AsyncDaytona", place: tuple[asyncio.AbstractEventLoop, str, str]
) -> AsyncIterator[None]:
    """The loop closes every unfinished generator before it ends."""
    try:
        yield
    finally:
        _clients.pop(place, None)
        await made.close()  # type: ignore[no-untyped-call]  # the SDK left it so


def unread_file(folder: Path) -> str:
    """The SDK reads `.env` of the working folder, which anybody's checkout may have: why not here."""
    for name in (".env", ".env.local"):
        try:
            lines = (folder / name).read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            found = re.match(r"\s*(?:export\s+)?(DAYTONA_[A-Z_]+)\s*=", line)
            if found and found[1] not in os.environ:
                return (
                    f"{found[1]} stands in {folder / name}, which the Daytona SDK would read: "
                    "export it in the worker's environment, or remove it there"
                )
    return ""


def typed(error: Exception, what: str, *, key_works: bool) -> PerdureError:
    """The failure as one of ours. `key_works`: the API key was accepted before.

    Raises: `error` itself, when it is none of the service's."""
    import daytona

    if isinstance(error, PerdureError):
        return error
    if not isinstance(error, daytona.DaytonaError | OSError):  # TimeoutError is an OSError
        raise error  # ours
    said = f"Daytona: {what}: {type(error).__name__}: {error}"[:500]
    status = getattr(error, "status_code", None)
    match error:
        case daytona.DaytonaAuthenticationError():
            if key_works:
                return ControlPlaneError(said, retry_after=REFUSAL_PASSES_S)
            return ConfigurationError(f"{said}; start the workers with a valid DAYTONA_API_KEY")
        case daytona.DaytonaForbiddenError():
            return ConfigurationError(f"{said}; the account of DAYTONA_API_KEY may not do this")
        case daytona.DaytonaRateLimitError():
            if QUOTA.search(str(error)):
                return RateLimited(said, limit="concurrency", retry_after=RELEASE_S)
            return RateLimited(said, retry_after=retry_after(error.headers) or 1.0)
        case daytona.DaytonaNotFoundError():
            return Missing(said)
        case daytona.DaytonaConflictError():
            return Conflict(said)
        case daytona.DaytonaTimeoutError() | daytona.DaytonaConnectionError():
            return ControlPlaneError(said)
        case daytona.DaytonaBadRequestError() | daytona.DaytonaUnprocessableEntityError():
            return _refused(said)
    if status == 413:
        return ConfigurationError(f"{said}; it is larger than the service takes")
    if status == 507:
        return ConfigurationError(f"{said}; the sandbox's disk is full, give it a larger one")
    if status is not None and (other := _by_status(status)):
        return typed(other(str(error), status), what, key_works=key_works)
    return ControlPlaneError(said)


def _refused(said: str) -> PerdureError:
    """400 and 422 say in words whether they are about the request or about the moment."""
    if QUOTA.search(said):
        return RateLimited(said, limit="concurrency", retry_after=RELEASE_S)
    if NOT_NOW.search(said):
        return ControlPlaneError(said)
    return ConfigurationError(said)


def _by_status(status: int) -> Any:
    """Uploads fail by the base class, whatever their status."""
    import daytona

    return {
        400: daytona.DaytonaBadRequestError,
        401: daytona.DaytonaAuthenticationError,
        403: daytona.DaytonaForbiddenError,
        404: daytona.DaytonaNotFoundError,
        409: daytona.DaytonaConflictError,
        429: daytona.DaytonaRateLimitError,
    }.get(status)


def retry_after(headers: Mapping[str, Any]) -> float | None:
    """Seconds, from `Retry-After` or one with the name of a throttler behind it; a date as well."""
    for name, value in headers.items():
        if name.lower().startswith("retry-after"):
            text = str(value).strip()
            if re.fullmatch(r"\d+(\.\d+)?", text):
                return float(text)
            try:
                return max(1.0, parsedate_to_datetime(text).timestamp() - time.time())
            except ValueError:
                return None
    return None
