"""Runs a row's own parser: a program that reads what the tests, and so hostile code, printed.

It runs on the worker, confined by bubblewrap. It sees this Python, the system's programs and the
test output, but no network, no environment variable and no other file of the host.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from perdure.errors import Boundary, MissingDependency, RetryHere
from perdure.graders.reports.log_parsers import Statuses
from perdure.limited_process import Unparsable
from perdure.sandboxes.host.sandbox_programs import program as program_of_host
from perdure.types import TestStatus

INSIDE = "/output"
"""The folder with both streams; the parser can write only here."""
_STARTED = "started"
"""This file exists once bubblewrap has started the parser."""
_PARSER = ("parser.py", "stdout.log", "stderr.log", "output.json")
_NOT_ALLOWED = ("no permissions", "not permitted", "permission denied")
"""What bubblewrap says where the kernel refuses it namespaces, as in pods of the Helm chart."""


@cache
def check() -> None:
    """Raises: MissingDependency without bubblewrap, or if this host does not let it run."""
    with TemporaryDirectory() as folder:
        tried = subprocess.run(
            _confined(Path(folder), ["true"]), env={}, capture_output=True, check=False
        )
    said = tried.stderr[-200:].decode("utf-8", "replace").strip()
    if tried.returncode and any(words in said.lower() for words in _NOT_ALLOWED):
        raise MissingDependency(
            f"bubblewrap, which confines the row's parser, cannot run here: {said}; grade such "
            "rows with workers on hosts of their own, not in pods"
        )


def parse_output(program: str, stdout: bytes, stderr: bytes) -> dict[str, TestStatus]:
    """The statuses that the row's parser finds. Call this through `read`.

    By the publisher's rules, PASSED wins over another status of the same test, and a skipped test
    counts as missing. Raises: Unparsable when the parser gives no result; RetryHere when bubblewrap
    cannot start it.
    """
    with TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "parser.py").write_text(program)
        (place / "stdout.log").write_bytes(stdout)
        (place / "stderr.log").write_bytes(stderr)
        command = _confined(place, [sys.executable, "-I", *_PARSER])
        done = subprocess.run(command, env={}, capture_output=True, check=False)
        said = done.stderr[-200:].decode("utf-8", "replace").strip()
        if not (place / _STARTED).exists():
            raise RetryHere(f"the row's parser did not start: {said}", boundary=Boundary.WORKER)
        try:
            tests = json.loads((place / "output.json").read_bytes())["tests"]
            named = [(str(test["name"]), str(test["status"])) for test in tests]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise Unparsable(f"the row's parser failed: {said or error}") from None
    return _statuses(named)


def _confined(place: Path, command: Sequence[str]) -> list[str]:
    start = ["/bin/sh", "-c", f': >{_STARTED}; exec "$@"', "sh", *command]
    return [
        *(program_of_host("bwrap"), "--unshare-all", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--dev", "/dev", "--tmpfs", "/tmp", *_readable()),
        *("--bind", str(place), INSIDE, "--remount-ro", "/", "--chdir", INSIDE, "--", *start),
    ]


def _readable() -> list[str]:
    """The system's programs and libraries, and this Python."""
    system = [name for name in ("/usr", "/bin", "/lib", "/lib64") if Path(name).exists()]
    prefixes = {sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix)}
    outside = sorted(prefix for prefix in prefixes if not f"{prefix}/".startswith("/usr/"))
    return [part for path in (*system, *outside) for part in ("--ro-bind", path, path)]


def _statuses(named: list[tuple[str, str]]) -> Statuses:
    found: Statuses = {}
    for name, status in named:
        if status == TestStatus.PASSED or found.get(name) is not TestStatus.PASSED:
            found[name] = _STATUS.get(status, TestStatus.ERROR)
    return found


_STATUS: dict[Any, TestStatus] = {
    "PASSED": TestStatus.PASSED,
    "FAILED": TestStatus.FAILED,
    "SKIPPED": TestStatus.MISSING,
}
