"""Reads mini-swe-agent's output, SWE-bench predictions, and SWE-bench's reports about them.

mini-swe-agent writes no verdicts. Its trajectories say how the agent ended. If an error ended it,
there is no work to grade. SWE-bench's verdicts are in its reports.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from perdure.adoption.foreign_rollouts import ForeignRollout, Reading
from perdure.errors import ConfigurationError
from perdure.rollouts import predictions
from perdure.rollouts.predictions import BadJson

MINI, SWE_BENCH = "mini-swe-agent", "SWE-bench"
OWN_ENDS = ("Submitted", "LimitsExceeded", "TimeExceeded", "RepeatedFormatError")
"""Exit statuses of agents that ended by themselves. Other statuses are names of exceptions."""
MINI_FILES = ("minisweagent.log", "exit_statuses_*.yaml", predictions.TRAJECTORIES)
SUMMARY, INSTANCE_REPORTS = "*.json", "**/report.json"
RESOLVED = "resolved"
Entry = tuple[str, Mapping[str, Any]]


def read(path: Path) -> Reading:
    """Raises: ConfigurationError naming file, field and fix."""
    notes: list[str] = []
    verdicts = _verdicts(path, notes) if path.is_dir() else {}
    found = [*_trajectories(path, notes)] if path.is_dir() else []
    known = {one.instance_id for one in found}
    for where, entry in _predictions(path, notes, may_be_cut=bool(found)):
        if predictions.text_of(where, entry, "instance_id") not in known:
            found.append(_of_prediction(path, where, entry))
    return Reading(tuple(_judged(one, verdicts) for one in found), tuple(notes))


def _trajectories(folder: Path, notes: list[str]) -> Iterator[ForeignRollout]:
    for file in sorted(folder.glob(predictions.TRAJECTORIES)):
        name = str(file.relative_to(folder))
        try:
            for where, entry in predictions.entries_of_file(file):
                yield _of_trajectory(where, name, entry)
        except BadJson:
            notes.append(f"{name} is not complete: mini-swe-agent was stopped while it wrote it")


def _of_trajectory(where: str, name: str, entry: Mapping[str, Any]) -> ForeignRollout:
    status = str(entry.get("exit_status") or "")
    ended = status in OWN_ENDS
    patch = predictions.patch_of(where, entry).decode("utf-8", "surrogateescape")
    return ForeignRollout(
        instance_id=predictions.text_of(where, entry, "instance_id"),
        origin=MINI,
        file=name,
        agent=MINI,
        model=predictions.model_of(entry),
        patch=patch if ended else None,
        lacks="mini-swe-agent does not grade" if ended else status or "its agent did not end",
    )


def _predictions(path: Path, notes: list[str], *, may_be_cut: bool) -> Iterator[Entry]:
    """`may_be_cut`: the list may be incomplete, because other files have its results too."""
    lists = [path / name for name in predictions.LISTS] if path.is_dir() else [path]
    others = sorted(path.glob("*.jsonl")) if path.is_dir() else []
    file = next((one for one in (*lists, *others) if one.is_file()), None)
    if file is None:
        return
    try:
        yield from predictions.entries_of_file(file)
    except BadJson:
        is_last_line = file.suffix == ".jsonl" and not file.read_bytes().endswith(b"\n")
        if not (may_be_cut or is_last_line):
            raise
        notes.append(f"{file.name} is not complete: it was cut off while it was written")


def _of_prediction(path: Path, where: str, entry: Mapping[str, Any]) -> ForeignRollout:
    """mini-swe-agent writes an empty patch and no trajectory if its environment did not start."""
    by_mini = path.is_dir() and any(next(path.glob(one), None) for one in MINI_FILES)
    patch = predictions.patch_of(where, entry).decode("utf-8", "surrogateescape")
    never_began = by_mini and not patch
    return ForeignRollout(
        instance_id=predictions.text_of(where, entry, "instance_id"),
        origin=MINI if by_mini else SWE_BENCH,
        file=where.removeprefix(f"{path}/"),
        agent=MINI if by_mini else "",
        model=predictions.model_of(entry),
        patch=None if never_began else patch,
        lacks="it has no trajectory" if never_began else "predictions have no verdict",
    )


def _judged(one: ForeignRollout, verdicts: Mapping[str, tuple[str, bool]]) -> ForeignRollout:
    if one.patch is None or one.instance_id not in verdicts:
        return one
    file, resolved = verdicts[one.instance_id]
    judged = {"origin": SWE_BENCH, "file": file, "scores": {RESOLVED: float(resolved)}, "lacks": ""}
    return one.model_copy(update=judged)


def _verdicts(folder: Path, notes: list[str]) -> dict[str, tuple[str, bool]]:
    """Instance id -> the report and its verdict. Instances that SWE-bench counts as errors, or as
    likely infrastructure failures, have no verdict. Raises: ConfigurationError if two reports
    disagree."""
    found: dict[str, tuple[str, bool]] = {}
    for file in sorted({*folder.glob(SUMMARY), *folder.glob(INSTANCE_REPORTS)}):
        name = str(file.relative_to(folder))
        try:
            document = json.loads(file.read_bytes())
        except ValueError:
            if file.name == "report.json":
                notes.append(f"{name} is not complete: its verdict does not count")
            continue
        for instance_id, resolved in _of_report(name, document):
            before = found.setdefault(instance_id, (name, resolved))
            if before[1] != resolved:
                raise ConfigurationError(
                    f"{before[0]} and {name} disagree about {instance_id}: remove one of them"
                )
    return found


def _of_report(name: str, document: Any) -> Iterator[tuple[str, bool]]:
    if not isinstance(document, dict):
        return
    if "resolved_ids" in document and "unresolved_ids" in document:
        lost = set(_ids(name, document, "infra_failure_ids"))
        yield from ((one, True) for one in _ids(name, document, "resolved_ids"))
        failed = _ids(name, document, "unresolved_ids")
        yield from ((one, False) for one in failed if one not in lost)
        return
    for instance_id, report in document.items():
        if isinstance(report, dict) and "patch_successfully_applied" in report:
            if not isinstance(report.get(RESOLVED), bool):
                raise ConfigurationError(
                    f"{name}: `{instance_id}.resolved` must be true or false: restore the report"
                )
            yield instance_id, report[RESOLVED]


def _ids(name: str, document: Mapping[str, Any], field: str) -> list[str]:
    ids = document.get(field, [])
    if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
        raise ConfigurationError(f"{name}: `{field}` must be a list of instance ids")
    return ids
