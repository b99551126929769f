"""The record of a run's changes, if an earlier change is written late."""

import json
from pathlib import Path

from perdure.rollouts.run_record import changes_of, current_request, record
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.types import RunRequest

FIRST = RunRequest(run_id="r", instances=("toy/a",), n_samples=1)


def _now(n_samples: int, asked_at: float) -> RunRequest:
    return FIRST.model_copy(update={"n_samples": n_samples, "asked_at": asked_at})


async def _started(folder: Path) -> LocalStore:
    store = LocalStore(folder)
    document = {"request": FIRST.model_dump(mode="json")}
    await store.put_if_absent(store_keys.run("r"), json.dumps(document).encode())
    return store


async def test_a_change_that_is_recorded_late_reverts_no_later_one(tmp_path: Path) -> None:
    """A late try of an activity may come after the change that followed."""
    store = await _started(tmp_path)
    await record(store, _now(2, 10.0))
    await record(store, _now(3, 20.0))

    await record(store, _now(2, 10.0))

    assert [change.at for change in await changes_of(store, "r")] == [10.0, 20.0]
    assert (await current_request(store, "r")).n_samples == 3


async def test_a_change_back_is_recorded(tmp_path: Path) -> None:
    """Times decide what is late, not values."""
    store = await _started(tmp_path)
    for n_samples, asked_at in ((2, 10.0), (3, 20.0), (2, 30.0), (2, 30.0)):
        await record(store, _now(n_samples, asked_at))

    told = [change.told for change in await changes_of(store, "r")]
    assert told == [("n_samples: 1 -> 2",), ("n_samples: 2 -> 3",), ("n_samples: 3 -> 2",)]
