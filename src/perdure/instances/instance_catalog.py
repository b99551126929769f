"""The catalog: stores instances by reference and finds them again. `rows` and `recipes` make them."""

import difflib
import json
import re
from typing import Any

from perdure.errors import ConfigurationError, InstanceError, NotFound
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import INSTANCE_REF, Instance

SUFFIX = ".json"
HOW_TO_ADD = "`perdure instances build` or `perdure instances import` adds it"


async def save(store: Store, instance: Instance) -> None:
    """Store the instance under its reference. It replaces an older version."""
    await store.put(store_keys.instance(instance.ref), instance.model_dump_json(indent=1).encode())


async def save_import(store: Store, dataset: str, rows: list[dict[str, Any]]) -> None:
    """Store the import result of each row of the dataset's source."""
    await store.put(store_keys.dataset_import(dataset), json.dumps(rows, indent=0).encode())


async def load_import(store: Store, dataset: str) -> list[dict[str, Any]] | None:
    try:
        stored = await store.get(store_keys.dataset_import(dataset))
    except NotFound:
        return None
    rows: list[dict[str, Any]] = json.loads(stored.data)
    return rows


async def load(store: Store, ref: str) -> Instance:
    """The instance that `<dataset>/<instance_id>` names.

    Raises: ConfigurationError when `ref` has another form; NotFound naming similar references and
    the command that adds one; InstanceError when the stored object is not an instance.
    """
    if not re.match(INSTANCE_REF, ref):
        raise ConfigurationError(f"instance {ref!r} must have the form <dataset>/<instance_id>")
    try:
        stored = await store.get(store_keys.instance(ref))
    except NotFound:
        raise NotFound(await _not_found(store, ref)) from None
    try:
        return Instance.model_validate_json(stored.data)
    except ValueError as error:
        raise InstanceError(f"{store_keys.instance(ref)} is not an instance: {error}") from error


async def refs(store: Store, dataset: str) -> list[str]:
    """References of a dataset's instances in lexical order; empty when there is no such dataset."""
    prefix = store_keys.dataset_prefix(dataset)
    return [
        f"{dataset}/{key.removeprefix(prefix).removesuffix(SUFFIX)}"
        async for key in store.list(prefix)
    ]


async def datasets(store: Store) -> list[str]:
    """Names of the datasets that have at least one instance."""
    root = store_keys.dataset_prefix("").removesuffix("/")
    return sorted({key.removeprefix(root).split("/", 1)[0] async for key in store.list(root)})


async def _not_found(store: Store, ref: str) -> str:
    dataset = ref.split("/", 1)[0]
    known = await refs(store, dataset)
    if not known:
        names = ", ".join(await datasets(store)) or "none yet"
        return f"no instance {ref!r}: the store has no dataset {dataset!r} ({names}); {HOW_TO_ADD}"
    ids = [one.split("/", 1)[1] for one in known]
    close = difflib.get_close_matches(ref.split("/", 1)[1], ids, n=3)
    names = ", ".join(f"{dataset}/{one}" for one in close or ids[:3])
    said = (
        f"did you mean {names}?" if close else f"it has {len(ids)} of {dataset}, such as {names};"
    )
    return f"no instance {ref!r} in {store.url}: {said} {HOW_TO_ADD}"
