"""The steps of a calibration, without Temporal: list the rows, conclude on one, report on all.

The runs are ordinary rollouts of the agents `oracle` and `nop`. They use the same sandboxes, grader
and durability as the rollouts whose rewards they are to justify.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import read_episode
from perdure.graders.twins.twin_support import why_no_twins
from perdure.instances import calibration_record, instance_catalog
from perdure.instances.calibration_record import Calibration, digest_of
from perdure.rollouts.activity_messages import (
    CalibrationPage,
    CalibrationPart,
    CalibrationRow,
    CalibrationSummary,
    Conclusion,
    PreparedRun,
    RowToConclude,
)
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.calibration.calibration_findings import Findings, findings
from perdure.rollouts.run_pages import select
from perdure.rollouts.stage_services import Services
from perdure.sandboxes import phase_specs
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.storage.store_preflight import check_store
from perdure.types import (
    AgentEnd,
    CalibrationRequest,
    CalibrationState,
    Grade,
    Instance,
    Outcome,
    RolloutStatus,
    distinct_twins,
)

DATA_ERROR = "InstanceError"
SHOWN = 20
"""Rows per category that the summary names. The report in the store has all of them."""


@dataclass(frozen=True)
class Played:
    """The results of a row's rollouts."""

    gold: Sequence[Grade] = ()
    base: Sequence[Grade] = ()
    defect: str = ""
    """Why a rollout has no grade, if the row itself is the cause."""
    missing: str = ""
    """Why a rollout has no grade, if the cause is something else."""


async def prepare(services: Services, request: CalibrationRequest) -> PreparedRun:
    """Raises: ConfigurationError, also for a store that has never worked; StoreUnavailable."""
    await check_store(services.settings, lambda: services.store)
    run = request.run_request()
    phase_specs.check(run.rollout_request("any/instance"), None, services.provider)
    refs = await select(services.store, run)
    key = store_keys.calibration_rows(request.workflow_id)
    await services.store.put(key, json.dumps(refs, indent=0).encode())
    return PreparedRun(total=len(refs), uri=f"{services.store.url}/{key}")


async def load_part(store: Store, part: CalibrationPart) -> CalibrationPage:
    listed = json.loads(
        (await store.get(store_keys.calibration_rows(part.calibration.workflow_id))).data
    )
    refs = listed[part.start : part.stop]
    rows = [await _row(store, part.calibration, ref) for ref in refs]
    return CalibrationPage(rows=tuple(rows), total=len(listed))


async def conclude(store: Store, asked: RowToConclude) -> Conclusion:
    """Evaluate the episodes of a row's rollouts and store its record.

    A row gets no record if its rollouts failed for a reason other than the row. The same command
    tries it again.
    """
    instance = await instance_catalog.load(store, asked.row.instance)
    played = await _played(store, asked.calibration, asked.row)
    if played.missing:
        return Conclusion(reason=played.missing[:200])
    found = (
        Findings(played.defect)
        if played.defect
        else findings(instance.grading, played.gold, played.base)
    )
    record = _record(asked.calibration, instance, played, found)
    await calibration_record.save(store, record)
    return Conclusion(
        state=record.state.value,
        reason=record.reason[:200],
        may_have_twins=_may_have_twins(asked.calibration, record, instance),
    )


async def report(store: Store, request: CalibrationRequest) -> CalibrationSummary:
    """Write the report of all rows of this calibration. Returns its counts."""
    refs = json.loads((await store.get(store_keys.calibration_rows(request.workflow_id))).data)
    records: dict[str, Calibration] = {}
    undecided: dict[str, str] = {}
    for ref in refs:
        record = await _fresh(store, request, await instance_catalog.load(store, ref))
        if record is not None:
            records[ref] = record
        else:
            undecided[ref] = await _why_undecided(store, request, ref)
    key = store_keys.calibration_report(request.workflow_id)
    summary = _summary(request.dataset, f"{store.url}/{key}", records, undecided)
    document = {
        "request": request.model_dump(mode="json", exclude_defaults=True),
        "summary": summary.model_dump(mode="json"),
        "undecided": undecided,
        "rows": {ref: _line(record) for ref, record in records.items()},
    }
    await store.put(key, json.dumps(document, indent=1).encode())
    return summary


async def with_calibration(job: Job) -> Job:
    """The job with the test lists that calibration proved for its grading sandboxes."""
    if isinstance(job.row, Instance) and not job.request.run_id.startswith(CalibrationRow.RUN):
        record = await calibration_record.read(
            job.services.store, job.row, job.grade_sandbox.placement.provider
        )
        if record is not None and record.state is CalibrationState.PROVED:
            row = calibration_record.joined(job.row, record)
            job = replace(job, row=row, without_twin=record.without_twin)
        return replace(job, calibration=record.state if record else None)
    return job


def _summary(
    dataset: str, uri: str, records: Mapping[str, Calibration], undecided: Mapping[str, str]
) -> CalibrationSummary:
    known = list(records.values())
    states = Counter(record.state for record in known)
    listed = [record.base_passes for record in known if record.base_passes is not None]
    runs = sum(record.runs for record in known)
    bad = {r.instance: r.reason for r in known if r.state is CalibrationState.QUARANTINED}
    complete = [record for record in known if record.twin_draws and not record.without_twin]
    without = {
        r.instance: "; ".join(f"{test}: {why}" for test, why in list(r.without_twin.items())[:2])
        for r in known
        if r.without_twin
    }
    return CalibrationSummary(
        dataset=dataset,
        uri=uri,
        rows=len(known) + len(undecided),
        proved=states[CalibrationState.PROVED],
        quarantined=states[CalibrationState.QUARANTINED],
        undecided=len(undecided),
        dropped_tests=sum(len(record.dropped) for record in known),
        with_twins=len(complete),
        under_other_fixes=sum(len(record.variants) >= 2 for record in complete),
        ceiling=_share(sum(record.gold_resolved for record in known), runs),
        floor=_share(sum(record.base_resolved for record in known), runs),
        base_passes=_share(sum(listed), len(listed)),
        why_quarantined=dict(list(bad.items())[:SHOWN]),
        why_undecided=dict(list(undecided.items())[:SHOWN]),
        why_without_twins=dict(list(without.items())[:SHOWN]),
    )


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _line(record: Calibration) -> dict[str, Any]:
    """A row of the report, with the number of twins. The record has the twins."""
    told = record.model_dump(mode="json", exclude={"twin_draws"})
    draws = record.twin_draws
    return {**told, "twins": None if draws is None else len(distinct_twins(draws))}


async def _why_undecided(store: Store, request: CalibrationRequest, ref: str) -> str:
    played = await _played(store, request, await _row(store, request, ref))
    return played.missing or "its rollouts have ended, but no conclusion was reached"


async def _played(store: Store, request: CalibrationRequest, row: CalibrationRow) -> Played:
    found: dict[str, list[Grade]] = {"oracle": [], "nop": []}
    for agent, grades in found.items():
        for number in range(request.runs):
            episode = await read_episode(store, row.rollout(request, agent, number))
            if episode is None or episode.grade is None:
                return _without_grade(episode, agent)
            grades.append(episode.grade)
    return Played(found["oracle"], found["nop"])


async def _row(store: Store, request: CalibrationRequest, ref: str) -> CalibrationRow:
    instance = await instance_catalog.load(store, ref)
    record = await _fresh(store, request, instance)
    parts = [digest_of(instance), request.round, request.rollout]
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    lacks_twins = (
        record and record.twin_draws is None and _may_have_twins(request, record, instance)
    )
    state = record.state.value if record and not lacks_twins else ""
    return CalibrationRow(instance=ref, key=key, state=state)


async def _fresh(
    store: Store, request: CalibrationRequest, instance: Instance
) -> Calibration | None:
    """The record, if it has the runs and the round that the request asks for."""
    record = await calibration_record.read(store, instance, _sandbox(request, instance))
    if record is None or record.runs < request.runs:
        return None
    return record if request.round in (0, record.round) else None


def _sandbox(request: CalibrationRequest, instance: Instance) -> str:
    """The provider of the grading sandboxes."""
    rollout = request.run_request().rollout_request(instance.ref)
    return phase_specs.place(rollout, instance, "grade").provider


def _without_grade(episode: Episode | None, agent: str) -> Played:
    if episode is None:
        return Played(
            missing=f"a rollout of {agent} has not finished: another calibration may run it"
        )
    if episode.status is not RolloutStatus.FAILED:
        return Played(missing=f"a rollout of {agent} is {episode.status}")
    failure = episode.failure
    if agent == "oracle" and episode.agent_end is AgentEnd.CRASHED:
        said = episode.attempts[-1].agent_detail if episode.attempts else ""
        return Played(defect=f"`patch` does not apply: {said}")
    said = failure.message if failure else "no reason is recorded"
    if failure is not None and failure.type == DATA_ERROR:
        return Played(defect=said)
    return Played(missing=said)


def _record(
    request: CalibrationRequest, instance: Instance, played: Played, found: Findings
) -> Calibration:
    return Calibration(
        instance=instance.ref,
        instance_sha256=digest_of(instance),
        sandbox=_sandbox(request, instance),
        state=CalibrationState.QUARANTINED if found.reason else CalibrationState.PROVED,
        reason=found.reason,
        runs=request.runs,
        gold_resolved=sum(grade.outcome is Outcome.RESOLVED for grade in played.gold),
        base_resolved=sum(grade.outcome is Outcome.RESOLVED for grade in played.base),
        round=request.round,
        fail_to_pass=found.fail_to_pass,
        pass_to_pass=found.pass_to_pass,
        dropped=found.dropped,
        base_passes=found.base_passes,
        longest_run_s=round(max([g.seconds for g in (*played.gold, *played.base)], default=0), 3),
    )


def _may_have_twins(request: CalibrationRequest, record: Calibration, instance: Instance) -> bool:
    wanted = request.twins and record.state is CalibrationState.PROVED
    return bool(wanted) and why_no_twins(instance.grading) is None
