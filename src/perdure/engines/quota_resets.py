"""When a model account takes calls again: one object in the store for each model.

A gateway notes the reset that a hosted API names. All workers and gateways of a home read it: until
then, rollouts of the model boot no sandbox.
"""

import hashlib
import hmac
from collections.abc import Iterable

from perdure.errors import NotFound
from perdure.storage.base import Store
from perdure.types import Frozen

NEAR_S = 1.0
"""A reset is written again only if it differs from the last one by at least this many seconds."""


class QuotaReset(Frozen):
    """The model account takes no calls before `resets_at`, Unix seconds. `reason`: the provider's
    answer, for users."""

    resets_at: float
    reason: str


class QuotaResets:
    """The resets of one endpoint's models.

    Example:
        resets = QuotaResets(store, secret, "https://api.openai.com/v1")
        await resets.note("gpt-x", QuotaReset(resets_at=1795838400, reason="... answered 429 ..."))
        await resets.last(["gpt-x", "gpt-x-mini"], now=1795830000)
    """

    def __init__(self, store: Store, secret: bytes, url: str) -> None:
        """`secret`: the home's, so that homes with other keys of the endpoint are not affected."""
        self._store = store
        self._secret = secret
        self._url = url.rstrip("/")
        self._noted: dict[str, float] = {}

    async def note(self, model: str, reset: QuotaReset) -> None:
        """Raises: StoreUnavailable."""
        if abs(self._noted.get(model, 0.0) - reset.resets_at) < NEAR_S:
            return
        await self._store.put(self._key(model), reset.model_dump_json().encode())
        self._noted[model] = reset.resets_at

    async def last(self, models: Iterable[str], now: float) -> QuotaReset | None:
        """The last reset after `now` among these models; None if all of them take calls.

        Raises: StoreUnavailable.
        """
        found = [reset for model in models if (reset := await self._of(model)) is not None]
        ahead = [reset for reset in found if reset.resets_at > now]
        return max(ahead, key=lambda reset: reset.resets_at, default=None)

    async def _of(self, model: str) -> QuotaReset | None:
        try:
            return QuotaReset.model_validate_json((await self._store.get(self._key(model))).data)
        except (NotFound, ValueError):  # a damaged note costs one refused call
            return None

    def _key(self, model: str) -> str:
        account = f"quota {self._url} {model}".encode()
        name = hmac.new(self._secret, account, hashlib.sha256).hexdigest()[:16]
        return f"engines/quota/{name}.json"
