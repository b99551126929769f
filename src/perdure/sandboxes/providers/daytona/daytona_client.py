"""The Daytona SDK's client, one per event loop.

Only the asynchronous client is used: the synchronous one repeats a command after a lost connection.
"""

import asyncio
import re
import warnings
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.errors import ConfigurationError
from perdure.settings import process_environment

if TYPE_CHECKING:
    from daytona import AsyncDaytona

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

    Raises: ConfigurationError when the SDK would read a setting from a `.env` file here.
    """
    account = {name: process_environment.foreign(name) for name in NAMES}
    loop = asyncio.get_running_loop()
    place = (loop, account["DAYTONA_API_URL"], account["DAYTONA_API_KEY"])
    if place not in _clients:
        await asyncio.to_thread(_import)  # it takes seconds, and heartbeats must continue
    if place not in _clients:
        made = _make(account)
        closing = _close_with_loop(made, place)
        _clients[place] = made, closing
        await anext(closing)
    return _clients[place][0]


def _import() -> None:
    """Build the models once, because two concurrent first uses would see incomplete ones."""
    import daytona
    import daytona_api_client_async as api
    import daytona_toolbox_api_client_async as toolbox

    for model in (
        daytona.CreateSandboxFromImageParams, daytona.CreateSandboxFromSnapshotParams,
        daytona.CreateSnapshotParams, api.CreateBuildInfo, api.CreateSandbox, api.CreateSnapshot,
        api.ListSandboxesResponse, api.Sandbox, api.SandboxListItem, api.SnapshotDto,
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
        use_deprecated_polling=True,  # no event socket: we poll anyway
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
        await made.close()  # type: ignore[no-untyped-call]  # untyped in the SDK


def unread_file(folder: Path) -> str:
    """Why the SDK must not run here: it would read a setting from the working folder's `.env`."""
    for name in (".env", ".env.local"):
        try:
            lines = (folder / name).read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            continue
        for line in lines:
            found = re.match(r"\s*(?:export\s+)?(DAYTONA_[A-Z_]+)\s*=", line)
            if found and not process_environment.foreign(found[1]):
                return (
                    f"{found[1]} is set in {folder / name}, which the Daytona SDK would read: "
                    "export it in the worker's environment, or remove it from that file"
                )
    return ""
