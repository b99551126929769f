"""In a fresh sandbox, applies the diff, writes the hidden tests and runs a command.

The provider reports exit codes, `forged_results.py` checks the output, and the protocols give the
verdict.
"""

import io
import posixpath
import signal
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from secrets import token_hex
from typing import Literal

from perdure.errors import (
    Boundary,
    ControlPlaneError,
    InstanceError,
    RateLimited,
    RetryHere,
    SandboxLost,
)
from perdure.graders.diff.git_diff_parser import parse
from perdure.sandboxes.base import Exec, ExecState, ExecStatus, Sandbox, check_host
from perdure.types import Instance, SourceKind


class Refusal(IntEnum):
    """Why the tests did not start: the exit code of the setup, which runs no hostile code."""

    UPLOAD = 91
    NO_REPOSITORY = 92
    PRE_COMMANDS = 93
    TESTS_DO_NOT_FIT = 94
    DOES_NOT_APPLY = 95
    CONFLICT = 96


class LostDuringTests(SandboxLost):
    """The sandbox was lost while code under test ran in it, and that code may have caused it."""


class SilentDuringTests(LostDuringTests):
    """The sandbox did not answer while code under test ran in it. That code may have used up its
    processes, or the sandbox service is down."""


@dataclass(frozen=True)
class TestRun:
    """The result of a run. With a `refusal`, no test ran and `log` is the output of git."""

    __test__ = False  # a noun of grading, not a pytest class

    status: ExecStatus
    log: bytes
    junit: bytes | None = None
    refusal: Refusal | None = None

    @property
    def refusal_text(self) -> str:
        """The last lines of git's output, joined into one."""
        return "; ".join(last_lines(self.log, 3))[:500]


def last_lines(log: bytes, count: int) -> list[str]:
    """At most `count` lines of the last 8 KiB: hostile code may write any number of any length."""
    return log.rstrip()[-8192:].decode("utf-8", "replace").strip().splitlines()[-count:]


@dataclass(frozen=True)
class Command:
    """What to run in the workdir once the diff is applied and the hidden tests are written."""

    shell: str
    extra_files: Mapping[str, bytes]
    """Path below the workdir -> content. Written last, so these replace files of the diff."""
    junit_path: str = ""
    """Where the runner writes its junit file; empty if it writes none."""
    test_patch: bytes = b""
    """The row's test patch with a canary test in it; empty if nothing is added."""


NOT_STARTED = (125, 126)
"""Exit codes of a host sandbox that could not start a command; stderr then says why."""


def scratch_folder(sandbox: Sandbox) -> str:
    """A random name for the grader's own folder in the sandbox, outside the repository."""
    return f"{sandbox.tmp}/.perdure-{token_hex(12)}"


async def run_tests(
    sandbox: Sandbox,
    instance: Instance,
    patch: bytes,
    command: Command,
    *,
    scratch: str,
    timeout_s: float,
) -> TestRun:
    """Run the tests for at most `timeout_s`. `patch` is already filtered; if it does not apply,
    that is a result.

    Raises: InstanceError when the row's test patch does not apply to the base tree, or its
    `pre_commands` fail; LostDuringTests; RetryHere, SandboxLost when the sandbox failed.
    """
    upload = _upload(instance, patch, command, posixpath.basename(scratch))
    setup = await _run(sandbox, [_SETUP, "grade", scratch], upload, _SETUP_LIMIT_S)
    if not setup.status.ok:
        return _refused(instance, setup)
    tests = [_TESTS, "grade", scratch, command.junit_path]
    try:
        run = await _run(sandbox, tests, b"", timeout_s, ends_rest=True)
    except SandboxLost as error:
        raise LostDuringTests(str(error)) from error
    except RateLimited:
        raise
    except ControlPlaneError as error:  # the provider has already retried
        raise SilentDuringTests(str(error)) from error
    if run.status.code in NOT_STARTED and (run.junit or b"").startswith(b"sandbox: cannot "):
        raise LostDuringTests(last_lines(run.junit or b"", 1)[0])
    return replace(run, junit=_after_mark(run.junit, scratch))


def _after_mark(stderr: bytes | None, scratch: str) -> bytes | None:
    """Remove what bash printed at its start, such as a warning about a missing locale."""
    return (stderr or b"").partition(f"{scratch}\n".encode())[2] or None


async def _run(
    sandbox: Sandbox, script: list[str], stdin: bytes, timeout_s: float, *, ends_rest: bool = False
) -> TestRun:
    """Run one script; `junit` of the result is all of stderr.

    `ends_rest` kills processes that the script left running before its output is read. Setup does
    not set it, because `pre_commands` may start a service for the tests.
    """
    exec_id = f"grade-{token_hex(8)}"
    argv = ["bash", "-c", *script]
    await sandbox.start(exec_id, Exec(argv, cwd=sandbox.workdir, stdin=stdin, timeout_s=timeout_s))
    status = await sandbox.wait(exec_id, timeout_s + _GRACE_S)
    check_host(sandbox, status)
    if status.state in (ExecState.LOST, ExecState.RUNNING) or status.cause == "sandbox":
        raise SandboxLost(f"the test run in {sandbox.identity} has no result: {status}")
    if ends_rest:
        await sandbox.signal(exec_id, signal.SIGKILL)
    log = await _everything(sandbox, exec_id, "stdout")
    junit = await _everything(sandbox, exec_id, "stderr")
    return TestRun(status, log, junit or None)


_SETUP_LIMIT_S = 300.0
_GRACE_S = 60.0
"""A command that the provider has not ended this long after its limit counts as lost."""

# Setup and tests are two execs. Tests can truncate files that they may write, so only the exit code
# of an exec that runs no hostile code can tell a defective row from a hostile diff. If a patch does
# not apply, the setup tries the row's test patch on HEAD. If that applies, the diff is the cause.
_SETUP = r"""
dir=$1
exec 2>&1
run_git() {
  GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_LITERAL_PATHSPECS=1 LC_ALL=C \
  git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.autocrlf=false \
    -c core.attributesFile=/dev/null -c gc.auto=0 \
    --git-dir="$PWD/.git" --work-tree="$PWD" "$@" </dev/null
}
refuse() {  # $1: the exit code if the row is not at fault
  if [ -s "$dir/tests.patch" ]; then
    export GIT_INDEX_FILE=$dir/index
    run_git read-tree HEAD || exit 92
    run_git apply --check --cached --whitespace=nowarn "$dir/tests.patch" || exit 94
  fi
  exit "$1"
}
tar -xmf - -C "${dir%/*}" || exit 91
[ -d .git ] || { echo "no git repository at $PWD"; exit 92; }
if [ -s "$dir/pre.sh" ]; then bash -e "$dir/pre.sh" </dev/null || exit 93; fi
if [ -s "$dir/model.patch" ]; then
  run_git apply --whitespace=nowarn "$dir/model.patch" || refuse 95
fi
if [ -s "$dir/tests.patch" ]; then
  mapfile -d '' paths <"$dir/tests.paths"
  for path in "${paths[@]}"; do
    if [ -e "$path" ] || [ -L "$path" ]; then rm -rf -- "${paths[@]}"; break; fi
  done
  if [ -s "$dir/tests.known" ]; then
    run_git checkout -q HEAD --pathspec-from-file="$dir/tests.known" --pathspec-file-nul || refuse 96
  fi
  run_git apply --whitespace=nowarn "$dir/tests.patch" || refuse 96
fi
if [ -s "$dir/extra.tar" ]; then tar -xmf "$dir/extra.tar" || exit 96; fi
"""

_TESTS = r"""
dir=$1 junit=$2
exec 8>&2 2>&1
bash "$dir/run.sh" </dev/null 8>&-
code=$?
if [ -n "$junit" ] && [ -f "$junit" ] && [ ! -L "$junit" ]; then
  printf '%s\n' "$dir" >&8
  cat "$junit" >&8
fi
exit $code
"""


def _upload(instance: Instance, patch: bytes, command: Command, folder: str) -> bytes:
    """A tar of one folder, which must not exist in the sandbox."""
    grading = instance.grading
    test_patch = command.test_patch or grading.test_patch
    tests = parse(test_patch)
    known = {file.old_path for file in tests if not file.added}
    extra = {**grading.files, **command.extra_files}
    return _tar(
        {
            "model.patch": patch,
            "tests.patch": test_patch,
            "tests.paths": b"\0".join(sorted({path for file in tests for path in file.paths})),
            "tests.known": b"\0".join(sorted(known)),
            "pre.sh": _pre_commands(instance),
            "run.sh": command.shell.encode() + b"\n",
            "extra.tar": _tar(extra) if extra else b"",
        },
        folder,
    )


def _pre_commands(instance: Instance) -> bytes:
    """Empty for an image: `image_setup` has already run its commands."""
    in_image = instance.source.kind is SourceKind.IMAGE
    return b"" if in_image else "\n".join(instance.grading.pre_commands).encode()


def _tar(files: Mapping[str, bytes], folder: str = "") -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        if folder:
            top = tarfile.TarInfo(folder)
            top.type, top.mode = tarfile.DIRTYPE, 0o700
            tar.addfile(top)
        for name, data in files.items():
            entry = tarfile.TarInfo(posixpath.join(folder, name))
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


async def _everything(sandbox: Sandbox, exec_id: str, stream: Literal["stdout", "stderr"]) -> bytes:
    parts: list[bytes] = []
    offset = 0
    while part := await sandbox.output(exec_id, stream, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _refused(instance: Instance, setup: TestRun) -> TestRun:
    codes = {refusal.value: refusal for refusal in Refusal}
    refusal = codes.get(setup.status.code or 0)
    run = replace(setup, refusal=refusal)
    if refusal in (Refusal.DOES_NOT_APPLY, Refusal.CONFLICT):
        return run
    said = run.refusal_text
    if refusal is Refusal.TESTS_DO_NOT_FIT:
        raise InstanceError(f"{instance.ref}: `test_patch` does not apply to the base tree: {said}")
    if refusal is Refusal.PRE_COMMANDS:
        raise InstanceError(f"{instance.ref}: `pre_commands` failed: {said}")
    if refusal is Refusal.NO_REPOSITORY:
        raise InstanceError(f"{instance.ref}: `environment.workdir`: {said}")
    raise RetryHere(
        f"the grading sandbox could not be set up ({setup.status}): {said}",
        boundary=Boundary.GRADER,
    )
