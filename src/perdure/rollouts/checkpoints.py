"""One durable result per stage and attempt: the first writer wins, later ones read it back."""

from typing import TypeVar

from pydantic import BaseModel

from perdure.errors import NotFound
from perdure.storage.base import Store

Model = TypeVar("Model", bound=BaseModel)


async def read(store: Store, key: str, model: type[Model]) -> Model | None:
    """The checkpoint at `key`, or None when the step has not been done."""
    try:
        stored = await store.get(key)
    except NotFound:
        return None
    return model.model_validate_json(stored.data)


async def write(store: Store, key: str, result: Model) -> Model:
    """Store `result` unless another try was first; return what is stored either way."""
    if await store.put_if_absent(key, result.model_dump_json(indent=1).encode()):
        return result
    winner = await read(store, key, type(result))
    return winner if winner is not None else result
