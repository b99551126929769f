"""Runs a reader where its package is installed: in an environment that uv makes and caches, or with
an interpreter that the user names."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from perdure.adoption.foreign_rollouts import ForeignRollout, Reading
from perdure.errors import ConfigurationError, MissingDependency
from perdure.instances.uv_program import UNREACHABLE
from perdure.python_interpreters import find_interpreter, find_uv
from perdure.settings import process_environment
from perdure.types import Frozen
from perdure.types.validation_errors import faults

PROGRAMS = Path(__file__).parent / "in_reader"
TOLD = 400
"""Characters of a failed program's last lines in an error message."""


@dataclass(frozen=True)
class Reader:
    """A program of `in_reader/`, and the package it needs. `pythons`: Python versions, the
    preferred one first."""

    program: str
    package: str
    pythons: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.package.partition("==")[0]


HARBOR = Reader("harbor_job.py", "harbor==0.26.0", ("3.13", "3.12", "3.14"))
INSPECT = Reader("inspect_logs.py", "inspect-ai==0.3.285", ("3.12", "3.13", "3.11"))


class _Line(Frozen):
    """A line of a reader that is no rollout."""

    note: str = ""
    error: str = ""


def read(reader: Reader, path: Path, python: str = "") -> Reading:
    """`python`: an interpreter that has the package; by default, uv installs it.

    Raises: MissingDependency; ConfigurationError with the reader's sentence.
    """
    argv = [*_command(reader, python), str(PROGRAMS / reader.program), str(path.absolute())]
    done = subprocess.run(argv, capture_output=True, check=False, cwd="/", env=_environment())
    if done.returncode != 0:
        raise _failure(reader, python, done.stderr)
    rollouts, notes = [], []
    for line in done.stdout.splitlines():
        if line.startswith((b'{"note"', b'{"error"')):
            said = _Line.model_validate_json(line)
            if said.error:
                raise ConfigurationError(f"{path}/{said.error}")
            notes.append(said.note)
        else:
            rollouts.append(_rollout(path, line))
    return Reading(tuple(rollouts), tuple(notes))


def _rollout(path: Path, line: bytes) -> ForeignRollout:
    try:
        return ForeignRollout.model_validate_json(line)
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {faults(error, ForeignRollout)}") from error


def _command(reader: Reader, python: str) -> Sequence[str]:
    if python:
        return [python]
    words = ["run", "--quiet", "--isolated", "--no-project", "--no-config"]
    return [str(find_uv()), *words, "--python", _interpreter(reader), "--with", reader.package]


def _interpreter(reader: Reader) -> str:
    found = (find_interpreter(version) for version in reader.pythons)
    return next((str(one.program) for one in found if one), reader.pythons[0])


def _environment() -> Mapping[str, str]:
    """Turn off Harbor's telemetry, which is on by default."""
    return {**process_environment.variables(), "HARBOR_TELEMETRY": "0", "PYTHONPATH": ""}


def _failure(reader: Reader, python: str, stderr: bytes) -> Exception:
    lines = stderr.decode("utf-8", "replace").strip()[-TOLD:]
    fix = f"give --reader-python a Python that has {reader.name}, such as the one that made them"
    if python and b"ModuleNotFoundError" in stderr:
        return MissingDependency(f"{python} has no {reader.name}, which reads these results: {fix}")
    if UNREACHABLE.search(stderr):
        return MissingDependency(f"uv cannot fetch {reader.package}, which reads these: {fix}")
    return ConfigurationError(f"{reader.package} cannot read these results: {lines}; {fix}")
