"""What users note about a run: its name, note and tags, and whether it is archived.

All labels are under one prefix, so that a list of runs needs one listing. When a run is deleted,
its label is deleted last.
"""

import asyncio
from collections.abc import Callable, Mapping

from perdure.errors import ConfigurationError, NotFound, PreconditionFailed
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import Frozen


class RunLabel(Frozen):
    """Example: {"name": "Baseline", "tags": ["paper", "table-2"]}"""

    name: str = ""
    note: str = ""
    tags: tuple[str, ...] = ()
    archived: bool = False
    """Lists of runs leave it out."""
    is_deleting: bool = False
    """`perdure runs delete` has begun, and only it may touch the run."""

    @property
    def is_hidden(self) -> bool:
        """Whether lists of runs leave it out."""
        return self.archived or self.is_deleting

    @property
    def heading(self) -> str:
        """`Baseline [paper, table-2]`; empty without a name and tags."""
        tags = f"[{', '.join(self.tags)}]" if self.tags else ""
        return " ".join(part for part in (self.name, tags) if part)


NONE = RunLabel()


async def check_exists(store: Store, run_id: str) -> None:
    """Raises: NotFound if the store has nothing of the run; ConfigurationError if it is being deleted."""
    await check_not_deleting(store, run_id)
    async for _ in store.list(store_keys.run_prefix(run_id)):
        return
    raise NotFound(f"no run {run_id!r} in {store.url}: `perdure status` lists the runs")


async def read(store: Store, run_id: str) -> RunLabel:
    """An empty label if the run has none."""
    try:
        return RunLabel.model_validate_json((await store.get(store_keys.run_label(run_id))).data)
    except NotFound:
        return NONE


async def read_all(store: Store) -> Mapping[str, RunLabel]:
    """The labels by run id."""
    names = [key async for key in store.list(store_keys.RUN_LABELS)]
    ids = [key.removeprefix(store_keys.RUN_LABELS).removesuffix(".json") for key in names]
    return dict(zip(ids, await asyncio.gather(*(read(store, one) for one in ids)), strict=True))


async def change(store: Store, run_id: str, edit: Callable[[RunLabel], RunLabel]) -> RunLabel:
    """Change the label of a run and return the new one. Concurrent changes are not lost."""
    key = store_keys.run_label(run_id)
    while True:
        try:
            stored = await store.get(key)
        except NotFound:
            after = edit(NONE)
            if await store.put_if_absent(key, _data(after)):
                return after
            continue
        after = edit(RunLabel.model_validate_json(stored.data))
        try:
            await store.put(key, _data(after), if_match=stored.etag)
        except PreconditionFailed:
            continue
        return after


async def check_not_deleting(store: Store, run_id: str) -> None:
    """Raises: ConfigurationError if the deletion of the run has begun."""
    if (await read(store, run_id)).is_deleting:
        raise ConfigurationError(half_deleted(run_id))


def half_deleted(run_id: str) -> str:
    return f"run {run_id} is half deleted: `perdure runs delete {run_id}` deletes the rest"


def _data(label: RunLabel) -> bytes:
    return label.model_dump_json(indent=1, exclude_defaults=True).encode()
