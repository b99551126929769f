"""A row that a recipe can make, and the note about one that it could not make."""

import hashlib
from typing import Protocol

from perdure.errors import NotFound
from perdure.storage import keys
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
        """What decides the row: other facts make another row."""
        ...

    async def make(self, dataset: str, store: Store) -> Instance:
        """The instance; tests lists that only a run can tell are still empty.

        Raises: InstanceError (it can never be one), RetryHere (what it needs is out of reach).
        """
        ...


class Rejection(Frozen):
    """Why an entry makes no row. It is not tried again until the entry changes."""

    facts: str
    """Digest of the entry's facts."""
    problem: str


def digest_of(candidate: Candidate) -> str:
    return hashlib.sha256(candidate.facts.encode()).hexdigest()


async def reject(store: Store, ref: str, rejection: Rejection) -> None:
    await store.put(keys.rejection(ref), rejection.model_dump_json().encode())


async def accept(store: Store, ref: str) -> None:
    """Forget that the entry once made no row."""
    await store.delete(keys.rejection(ref))


async def rejected(store: Store, ref: str) -> Rejection | None:
    try:
        stored = await store.get(keys.rejection(ref))
    except NotFound:
        return None
    return Rejection.model_validate_json(stored.data)
