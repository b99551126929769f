"""Finds out which program wrote a folder of results, and reads it."""

import re
from pathlib import Path

from perdure.adoption import prediction_results, reader_process
from perdure.adoption.foreign_rollouts import Reading
from perdure.errors import ConfigurationError

LOG_START = re.compile(rb'\s*\{\s*"version"\s*:\s*\d+\s*,\s*"status"\s*:\s*"')
"""How Inspect begins a log in JSON."""
TRIAL_FILES = ("config.json", "result.json")
KNOWN = (
    "a job of Harbor (jobs/NAME), an output folder of mini-swe-agent, SWE-bench predictions "
    "(.json, .jsonl), or logs of Inspect (.eval, .json)"
)


def read(path: Path, python: str = "") -> Reading:
    """`python`: the interpreter for readers of Harbor and Inspect; empty: one that uv prepares.

    Raises: ConfigurationError naming file, field and fix; MissingDependency.
    """
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist: give {KNOWN}")
    found = _read(path, python)
    if not found.rollouts:
        why = f": {'; '.join(found.notes[:3])}" if found.notes else ""
        raise ConfigurationError(f"{path} has no result to adopt{why}; give {KNOWN}")
    return found


def _read(path: Path, python: str) -> Reading:
    if _is_harbor_job(path):
        return reader_process.read(reader_process.HARBOR, path, python)
    if _has_inspect_logs(path):
        return reader_process.read(reader_process.INSPECT, path, python)
    if path.is_dir() and (
        jobs := [one.name for one in sorted(path.iterdir()) if _is_harbor_job(one)]
    ):
        raise ConfigurationError(
            f"{path} holds {len(jobs)} jobs of Harbor: give one, such as {path / jobs[0]}"
        )
    return prediction_results.read(path)


def _is_harbor_job(path: Path) -> bool:
    """Harbor writes a config.json into the job's folder and into each trial's."""
    if not path.is_dir() or not (path / "config.json").is_file():
        return False
    return any((one / "config.json").is_file() for one in path.iterdir() if one.is_dir())


def _has_inspect_logs(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".eval" or (path.suffix == ".json" and _begins_as_log(path))
    if next(path.rglob("*.eval"), None) is not None:
        return True
    return any(_begins_as_log(one) for one in path.rglob("*.json") if one.is_file())


def _begins_as_log(path: Path) -> bool:
    with path.open("rb") as file:
        return LOG_START.match(file.read(200)) is not None
