"""Reads episodes through a gateway, for a trainer without credentials for the store.

It uses only the standard library, so that the client stays light.
"""

import asyncio
import urllib.error
import urllib.request

from perdure.errors import ConfigurationError, GatewayUnavailable, NotFound, StoreUnavailable
from perdure.home_folder import episodes_token
from perdure.storage.base import Stored
from perdure.types import EpisodeRef

TIMEOUT_S = 120.0
KEY_PARTS = 6
"""Parts of an episode's key: runs/<run>/rollouts/<instance>/<sample>/episode.json."""


class GatewayEpisodes:
    """Reads only the episode files of the store.

    Example:
        await read_episodes(refs, GatewayEpisodes("http://gateway:18001", secret))
    """

    def __init__(self, url: str, secret: bytes) -> None:
        """`secret`: the home's, PERDURE_SECRET."""
        self._url = url.rstrip("/")
        self._token = episodes_token(secret)

    def key_of(self, ref: EpisodeRef) -> str:
        """The key at the end of the reference's `uri`. Only the gateway knows the store's URL."""
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
        except OSError as error:  # includes URLError and timeouts
            raise GatewayUnavailable(f"{self._url} cannot be read: {error}") from error

    def _refused(self, key: str, status: int) -> Exception:
        if status == 404:
            return NotFound(f"{self._url} has no {key}")
        if status == 401:
            return ConfigurationError(
                f"{self._url} refuses the token: set PERDURE_SECRET to the secret of its home"
            )
        return StoreUnavailable(f"{self._url} answers {status} for {key}")
