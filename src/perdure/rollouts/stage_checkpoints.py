"""One durable result per stage and attempt. The first writer wins; later writers read it back."""

from typing import TypeVar

from pydantic import BaseModel

from perdure.errors import AttemptDamaged, NotFound
from perdure.storage import stored_json
from perdure.storage.base import Store

Model = TypeVar("Model", bound=BaseModel)


async def read(store: Store, key: str, model: type[Model]) -> Model | None:
    """The checkpoint at `key`, or None if the step is not done. Raises: AttemptDamaged."""
    try:
        stored = await store.get(key)
    except NotFound:
        return None
    try:
        return stored_json.decode(key, stored.data, model)
    except stored_json.Damaged as error:
        raise AttemptDamaged(f"{error}; a new attempt replays the recorded turns") from error


async def write(store: Store, key: str, result: Model) -> Model:
    """Store `result` unless another try was first. Returns what is stored."""
    if await store.put_if_absent(key, stored_json.encode(result)):
        return result
    winner = await read(store, key, type(result))
    return winner if winner is not None else result
