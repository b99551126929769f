"""An in-memory store whose calls take a random time, fail, lose their responses, or take effect
late."""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from perdure.errors import NotFound, PreconditionFailed, StoreUnavailable
from perdure.storage.base import Stored


class UnsteadyStore:
    """Conditional writes are exact. Without `seed` every call succeeds at once."""

    url = "s3://memory"
    worked = True

    def __init__(self, seed: int | None = None, lost: float = 0.0) -> None:
        """`lost`: share of the conditional writes whose response is lost."""
        self.objects: dict[str, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.away = False
        self.answers_lost = False
        self._lost = lost
        self._random = random.Random(seed) if seed is not None else None

    def below(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    async def get(self, key: str) -> Stored:
        await self._call("get")
        return self._get(key)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        await self._call("get")
        return self._get(key).data[start : start + length]

    async def exists(self, key: str) -> bool:
        await self._call("get")
        return key in self.objects

    async def put(self, key: str, data: bytes, *, if_match: str | None = None) -> str:
        await self._call("put")
        if if_match is not None and (
            key not in self.objects or _etag(self.objects[key]) != if_match
        ):
            raise PreconditionFailed(key)
        self.objects[key] = data
        return _etag(data)

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        await self._call("put")
        late = self._random is not None and self._random.random() < 0.03
        if late:
            asyncio.get_running_loop().call_later(0.02, self.objects.setdefault, key, data)
            raise StoreUnavailable("no answer in time")
        absent = self.objects.setdefault(key, data) is data
        await self._slow()
        if self.answers_lost or self._unlucky() or self._unlucky(self._lost):
            raise StoreUnavailable("the answer was lost")
        return absent

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[str]:
        await self._call("list")
        for key in [key for key in self.below(prefix) if key > after]:
            yield key

    async def sizes(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async for key in self.list(prefix):
            yield key, len(self.objects[key])

    async def delete(self, key: str) -> None:
        await self._call("delete")
        self.objects.pop(key, None)

    async def delete_many(self, keys: Sequence[str]) -> None:
        await self._call("delete")
        for key in keys:
            self.objects.pop(key, None)

    def heal(self) -> None:
        """Make every later call succeed."""
        self._random = None

    def _get(self, key: str) -> Stored:
        if key not in self.objects:
            raise NotFound(key)
        return Stored(self.objects[key], _etag(self.objects[key]))

    async def _call(self, kind: str) -> None:
        self.calls[kind] += 1
        await self._slow()
        if self.away or self._unlucky():
            raise StoreUnavailable("the store is away")

    async def _slow(self) -> None:
        if self._random is not None:
            for _ in range(self._random.randrange(4)):
                await asyncio.sleep(0)

    def _unlucky(self, share: float = 0.02) -> bool:
        return self._random is not None and self._random.random() < share


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
