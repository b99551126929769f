"""A row that a recipe can make, and the record of a row that it could not make."""

import hashlib
from typing import Protocol

from perdure.errors import NotFound
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import Frozen, Instance

DIGEST = "recipe"
"""In a built row's metadata: the digest of the facts that it was built from."""


class Candidate(Protocol):
    """One entry of a recipe."""

    @property
    def instance_id(self) -> str: ...

    @property
    def facts(self) -> str:
        """Text that decides the row's content; if it changes, the row is built again."""
        ...

    async def make(self, dataset: str, store: Store) -> Instance:
        """Make the instance; test lists that only a run can give are still empty.

        Raises: InstanceError (the entry can never make a row), RetryHere (a server is unreachable).
        """
        ...


class Rejection(Frozen):
    """Why an entry makes no row. The builder tries it again only if the entry changes."""

    facts: str
    """Digest of the entry's facts."""
    problem: str


def digest_of(candidate: Candidate) -> str:
    return hashlib.sha256(candidate.facts.encode()).hexdigest()


async def reject(store: Store, ref: str, rejection: Rejection) -> None:
    await store.put(store_keys.rejection(ref), rejection.model_dump_json().encode())


async def accept(store: Store, ref: str) -> None:
    """Delete the entry's rejection."""
    await store.delete(store_keys.rejection(ref))


async def rejected(store: Store, ref: str) -> Rejection | None:
    try:
        stored = await store.get(store_keys.rejection(ref))
    except NotFound:
        return None
    return Rejection.model_validate_json(stored.data)
