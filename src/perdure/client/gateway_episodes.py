"""Episodes over a gateway, for a trainer that has no credentials of the store.

Uses the standard library alone: the client stays light.
"""

import asyncio
import urllib.error
import urllib.request

from perdure.errors import ConfigurationError, GatewayUnavailable, NotFound, StoreUnavailable
from perdure.home import episodes_token
from perdure.storage.base import Stored
from perdure.types import EpisodeRef

TIMEOUT_S = 120.0
KEY_PARTS = 6
"""Of an episode's key: runs/<run>/rollouts/<instance>/<sample>/episode.json."""


class GatewayEpisodes:
    """Reads the files of episodes, and nothing else of the store.

    Example:
        await read_episodes(refs, GatewayEpisodes("http://gateway:18001", secret))
    """

    def __init__(self, url: str, secret: bytes) -> None:
        """`secret`: the home's, PERDURE_SECRET."""
        self._url = url.rstrip("/")
        self._token = episodes_token(secret)

    def key_of(self, ref: EpisodeRef) -> str:
        """Whatever store it is in: only the gateway knows that."""
        return "/".join(ref.uri.split("/")[-KEY_PARTS:])

    async def get(self, key: str) -> Stored:
        """Raises: NotFound, ConfigurationError (wrong secret), GatewayUnavailable, StoreUnavailable."""
        return Stored(await asyncio.to_thread(self._read, key), "")

    def _read(self, key: str) -> bytes:
        headers = {"authorization": f"Bearer {self._token}"}
        request = urllib.request.Request(f"{self._url}/episodes/{key}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                data: bytes = answer.read()
                return data
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(key, error.code) from None
        except OSError as error:  # URLError and a time-out too
            raise GatewayUnavailable(f"{self._url} cannot be read: {error}") from error

    def _refused(self, key: str, status: int) -> Exception:
        if status == 404:
            return NotFound(f"{self._url} has no {key}")
        if status == 401:
            return ConfigurationError(
                f"{self._url} refuses this process: set PERDURE_SECRET to that of its home"
            )
        return StoreUnavailable(f"{self._url} answers {status} for {key}")
