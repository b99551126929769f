"""The record of a row's calibration in one kind of sandbox. Readers join it with the row.

Rewards of a row without a record are marked: the row was not calibrated, or has changed since.
`perdure.rollouts.calibration` makes the records.
"""

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pydantic import Field

from perdure.errors import NotFound
from perdure.instances import instance_catalog
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import CalibrationState, Frozen, Instance, InstanceRef, TwinDraw

READS_AT_ONCE = 32


class Calibration(Frozen):
    """The record of one row in one kind of sandbox.

    Example:
        Calibration(instance="mine/x-1", instance_sha256="9f...", sandbox="bubblewrap", state="proved",
                    runs=3, fail_to_pass=("t.py::test_a",), dropped={"t.py::test_b": "flaky: ..."})
    """

    instance: InstanceRef
    instance_sha256: str
    """`digest_of` the row at its calibration."""
    sandbox: str
    state: CalibrationState
    reason: str = ""
    """Why it is quarantined."""
    runs: int
    """Runs with the gold patch, and the same number of runs of the unpatched base."""
    gold_resolved: int = 0
    """Runs of gold that resolve the row by its original lists, with flaky tests still in them."""
    base_resolved: int = 0
    """The same count for the unpatched base: how often an empty patch is rewarded."""
    round: int = 0
    """The `round` of the CalibrationRequest."""
    fail_to_pass: tuple[str, ...] = ()
    """Tests of the row's list that passed in all runs of gold and in no run of the base."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests of both lists that always pass with gold and are not flaky."""
    dropped: dict[str, str] = Field(default_factory=dict)
    """Test -> why calibration dropped it from its list."""
    base_passes: bool | None = None
    """The unpatched base passes every PASS_TO_PASS test of the row, in every run. None: the row has no
    such list."""
    longest_run_s: float = 0.0
    twin_draws: tuple[TwinDraw, ...] | None = None
    """Twins that were proven to fail under gold and base, together. None: calibration chose none."""
    without_twin: dict[str, str] = Field(default_factory=dict)
    """FAIL_TO_PASS test -> why it has no twin."""
    variants: tuple[str, ...] = ()
    """Other correct fixes, made from gold, under which every twin failed too. Only rows in Python
    have them."""
    canary: bool = False
    """`Grading.canary` of the proven row."""


class Mark(NamedTuple):
    """How a list of instances marks one of them."""

    state: CalibrationState | None
    """None: not calibrated in this kind of sandbox, or changed since."""
    reason: str = ""


def digest_of(instance: Instance) -> str:
    return hashlib.sha256(instance.model_dump_json().encode()).hexdigest()


async def save(store: Store, record: Calibration) -> None:
    key = store_keys.calibration(record.instance, record.sandbox)
    await store.put(key, record.model_dump_json(indent=1).encode())


async def read(store: Store, instance: Instance, sandbox: str) -> Calibration | None:
    """The record of this row; None if it has none, or changed since."""
    record = await _record(store, instance.ref, sandbox)
    return record if record and record.instance_sha256 == digest_of(instance) else None


def joined(instance: Instance, record: Calibration) -> Instance:
    """The row with the lists, twins and canary that calibration proved, and its time limit."""
    proved: dict[str, object] = {"timeout_s": _time_limit_s(instance, record)}
    if record.fail_to_pass:
        proved |= {"fail_to_pass": record.fail_to_pass, "pass_to_pass": record.pass_to_pass}
    if record.twin_draws is not None:
        proved |= {"twin_draws": record.twin_draws, "canary": record.canary}
    if record.twin_draws:  # twins are lines of `test_patch`, proven in place of those files
        proved["tests_from"] = None
    return instance.model_copy(update={"grading": instance.grading.model_copy(update=proved)})


TIMES_LONGEST, LEAST_LIMIT_S = 50, 300.0
"""A timeout is a verdict, so a busy host must not cause one. With the default slots and twins, 24
test runs share a host: on two cores, each takes twelve times as long as alone."""


def _time_limit_s(instance: Instance, record: Calibration) -> float:
    """Below the row's own limit, because a patch that never ends should not hold cores for half an
    hour."""
    own = instance.grading.timeout_s
    longest = record.longest_run_s
    return min(own, max(LEAST_LIMIT_S, TIMES_LONGEST * longest)) if longest else own


async def marks(store: Store, refs: Iterable[str], sandbox: str) -> dict[str, Mark]:
    """The mark of each reference, in the same order. Reads only rows that have a record."""
    found = await records(store, refs, sandbox)
    return {
        ref: Mark(here[0].state, here[0].reason) if here else Mark(None)
        for ref, here in found.items()
    }


async def records(
    store: Store, refs: Iterable[str], sandbox: str = ""
) -> dict[str, list[Calibration]]:
    """The valid records of each row, in the same order; with `sandbox`, only those of this kind."""
    wanted = list(refs)
    known: defaultdict[str, list[str]] = defaultdict(list)
    for dataset in {ref.split("/", 1)[0] for ref in wanted}:
        async for key in store.list(store_keys.calibrations(dataset)):
            known[store_keys.calibrated_ref(key)].append(key)
    slots = asyncio.Semaphore(READS_AT_ONCE)

    async def of(ref: str) -> list[Calibration]:
        here = [
            key for key in known[ref] if not sandbox or key == store_keys.calibration(ref, sandbox)
        ]
        if not here:
            return []
        async with slots:
            try:
                digest = digest_of(await instance_catalog.load(store, ref))
                stored = [(await store.get(key)).data for key in sorted(here)]
            except NotFound:  # the row was removed
                return []
        found = [Calibration.model_validate_json(data) for data in stored]
        return [record for record in found if record.instance_sha256 == digest]

    return dict(zip(wanted, await asyncio.gather(*map(of, wanted)), strict=True))


def quarantined(found: Mapping[str, Mark]) -> dict[str, str]:
    """Reference -> why it is quarantined."""
    return {
        ref: mark.reason
        for ref, mark in found.items()
        if mark.state is CalibrationState.QUARANTINED
    }


async def _record(store: Store, ref: str, sandbox: str) -> Calibration | None:
    try:
        stored = await store.get(store_keys.calibration(ref, sandbox))
    except NotFound:
        return None
    return Calibration.model_validate_json(stored.data)
