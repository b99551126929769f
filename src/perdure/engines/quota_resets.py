"""When an account takes calls or sandboxes again: one object in the store for each model account and
each sandbox account.

A gateway notes the reset that a hosted API names, and a worker notes that of a sandbox service. All
workers and gateways of a home read it: until then, rollouts that need the account have no sandbox.
"""

import hashlib
import hmac
from collections.abc import Iterable
from datetime import UTC, datetime
from urllib.parse import urlsplit

from perdure.errors import NotFound
from perdure.storage.base import Store
from perdure.types import Frozen

NEAR_S = 1.0
"""A reset is written again only if it differs from the last one by at least this many seconds."""
PREFIX = "engines/quota/"


class QuotaReset(Frozen):
    """The account grants nothing before `resets_at`, Unix seconds. `reason`: its provider's answer, for
    users."""

    resets_at: float
    reason: str
    account: str = ""
    """Its name for users, without a secret, such as `gpt-x at api.openai.com` or `e2b`."""


class QuotaResets:
    """The resets of all accounts of a home.

    Example:
        resets, account = QuotaResets(store, secret), model_account("https://api.openai.com/v1", "gpt-x")
        await resets.note(account, QuotaReset(resets_at=1795838400, reason="... answered 429 ..."))
        await resets.last([account, sandbox_account("e2b-1f2e3d4c")], now=1795830000)
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        """`secret`: the home's, so that homes with other keys of the endpoint are not affected."""
        self._store = store
        self._secret = secret

    async def note(self, account: str, reset: QuotaReset) -> None:
        """Raises: StoreUnavailable."""
        key = self._key(account)
        noted = await _read(self._store, key)
        if noted is None or abs(noted.resets_at - reset.resets_at) >= NEAR_S:
            await self._store.put(key, reset.model_dump_json().encode())

    async def last(self, accounts: Iterable[str], now: float) -> QuotaReset | None:
        """The last reset after `now` among these accounts; None if all of them are open.

        Raises: StoreUnavailable.
        """
        keys = [self._key(account) for account in accounts]
        return next(reversed(await _ahead(self._store, keys, now)), None)

    def _key(self, account: str) -> str:
        name = hmac.new(self._secret, account.encode(), hashlib.sha256).hexdigest()[:16]
        return f"{PREFIX}{name}.json"


async def closed_accounts(store: Store, now: float) -> list[QuotaReset]:
    """The resets after `now` of all accounts, the next one first. Raises: StoreUnavailable."""
    return await _ahead(store, [key async for key in store.list(PREFIX)], now)


async def open_accounts(store: Store) -> None:
    """Forget all resets: the next rollout that needs an account asks its provider.

    Raises: StoreUnavailable.
    """
    await store.delete_many([key async for key in store.list(PREFIX)])


async def _ahead(store: Store, keys: Iterable[str], now: float) -> list[QuotaReset]:
    found = [await _read(store, key) for key in keys]
    ahead = [reset for reset in found if reset is not None and reset.resets_at > now]
    return sorted(ahead, key=lambda reset: reset.resets_at)


async def _read(store: Store, key: str) -> QuotaReset | None:
    try:
        return QuotaReset.model_validate_json((await store.get(key)).data)
    except (NotFound, ValueError):  # a damaged note costs one refused call
        return None


def model_account(url: str, model: str) -> str:
    return f"quota {url.rstrip('/')} {model}"


def sandbox_account(account: str) -> str:
    """`account`: as `SandboxProvider.account`."""
    return f"sandboxes {account}"


def model_name(url: str, model: str) -> str:
    """`gpt-x at api.openai.com`: no credentials and no path."""
    return f"{model} at {urlsplit(url).hostname}"


def utc_minute(unix_s: float) -> str:
    """`2026-11-28 04:00 UTC`."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
