"""Moves an instance's artifacts from the agent's sandbox to the sandbox of the tests.

They are a tar from a sandbox in which hostile code was root, so the host stores it and never reads
it. Only members below the artifacts' own paths are unpacked.
"""

import posixpath
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perdure.errors import Boundary, InstanceError, NotFound, RetryHere, SandboxLost
from perdure.graders.diff.git_diff_parser import MalformedDiff, parse
from perdure.instances.rows.formats.harbor import ARTIFACTS_FOLDER
from perdure.sandboxes.base import ExecResult, ExecState, Sandbox

TRANSFER_TIMEOUT_S = 300.0
PACKED = "perdure-packed"
"""What a sidecar prints when tar has packed all, because the pipe hides tar's exit code."""


@dataclass(frozen=True)
class PackedArtifacts:
    """A tar of the artifacts that exist. `refused`: why there is no tar."""

    data: bytes
    refused: str = ""


async def pack_artifacts(
    sandbox: Sandbox, artifacts: Mapping[str, tuple[str, ...]], *, output_mb: int
) -> PackedArtifacts:
    """Pack the artifacts that exist. Absent ones are left out, as in Harbor. `output_mb`: the limit
    of the sandbox. Raises: SandboxLost, RetryHere."""
    lines = [
        _pack_line(path, _without_repository(path, out, sandbox.workdir))
        for path, out in artifacts.items()
    ]
    done = _check_finished(
        sandbox, await sandbox.exec("\n".join(lines), timeout=TRANSFER_TIMEOUT_S)
    )
    if done.status.cause == "output":
        return _too_large(output_mb)
    if not done.status.ok:
        said = done.stderr[-200:].decode("utf-8", "replace").strip()
        return PackedArtifacts(b"", f"the artifacts cannot be packed: {said or done.status}")
    return PackedArtifacts(done.stdout)


async def pack_sidecar_artifacts(
    sandbox: Sandbox, name: str, artifacts: Mapping[str, tuple[str, ...]], *, output_mb: int
) -> PackedArtifacts:
    """Pack the artifacts that exist in a sidecar's container; none if it has ended. Raises: InstanceError
    if its image has no shell or tar; SandboxLost, RetryHere."""
    limit = output_mb << 20
    lines = [_pack_line(path, out) for path, out in artifacts.items()]
    script = "\n".join(["{ (", *lines, f") && echo {PACKED} >&2; }} | head -c {limit + 1}"])
    try:
        done = await sandbox.sidecar_exec(
            name, ["sh", "-c", script], user="root", timeout_s=TRANSFER_TIMEOUT_S
        )
    except NotFound:
        return PackedArtifacts(b"")
    said = done.stderr[-200:].decode("utf-8", "replace").strip()
    if done.code in (126, 127) or "tar: not found" in said:
        raise InstanceError(f"the image of {name!r} needs sh and tar to give artifacts: {said}")
    if len(done.stdout) > limit:
        return _too_large(output_mb)
    if PACKED not in said:
        return PackedArtifacts(b"", f"the artifacts of {name!r} cannot be packed: {said}")
    return PackedArtifacts(done.stdout)


def _too_large(output_mb: int) -> PackedArtifacts:
    return PackedArtifacts(
        b"",
        f"artifacts_too_large: more than {output_mb} MB, the agent's limit for one output: set "
        "phases.agent.limits.output_mb",
    )


def _without_repository(path: str, left_out: tuple[str, ...], workdir: str) -> tuple[str, ...]:
    """The patterns, with one for the workdir's `.git`, because no tests get it."""
    repository = posixpath.relpath(posixpath.join(workdir, ".git"), path)
    return left_out if repository.startswith("../") else (*left_out, f"./{repository}")


def _pack_line(path: str, left_out: tuple[str, ...]) -> str:
    """As in Harbor, patterns are for members of a folder, and an empty ARTIFACTS_FOLDER is no
    artifact."""
    place, inside = shlex.quote(path), path.strip("/")
    pack = f"tar -C / -cf - {shlex.quote(inside)}"
    if left_out:
        inside = re.sub(r"([&\\,])", r"\\\1", inside)
        options = [*(f"--exclude={one}" for one in left_out), f"--transform=s,^\\.,{inside},S"]
        folder = f"tar -C {place} {shlex.join(options)} -cf - ."
        pack = f"if [ -d {place} ]; then {folder}; else {pack}; fi"
    absent = f"[ ! -e {place} ]"
    if path == ARTIFACTS_FOLDER:
        absent = f'[ -z "$(ls -A {place} 2>/dev/null)" ]'
    return f"{absent} || {{ {pack}; }} || exit 1"


async def unpack_artifacts(sandbox: Sandbox, artifacts: Iterable[str], packed: bytes) -> str:
    """Replace the sandbox's files at the paths of the packed artifacts, but not the repository of
    its workdir. Returns why the tar cannot be unpacked; empty if it was unpacked.

    Raises: InstanceError if the image has no tar; SandboxLost, RetryHere.
    """
    known = _check_finished(sandbox, await sandbox.exec("tar --help | grep -q ignore-zeros"))
    if not known.status.ok:
        raise InstanceError("the image of the tests lacks GNU tar, which unpacks the artifacts")
    archive = f"{sandbox.tmp}/.perdure-artifacts.tar"
    await sandbox.put(archive, packed)
    paths = [path.strip("/") for path in artifacts]
    # tar counts a member for the first path that contains it, and misses it for the second.
    paths = [one for one in paths if not any(one.startswith(f"{other}/") for other in paths)]
    argv = ["bash", "-c", _UNPACK_SCRIPT, archive, sandbox.workdir, *paths]
    done = _check_finished(sandbox, await sandbox.exec(argv, timeout=TRANSFER_TIMEOUT_S))
    said = done.stderr[-200:].decode("utf-8", "replace").strip()
    return "" if done.status.ok else f"the artifacts cannot be unpacked: {said or done.status}"


def outside_artifacts(patch: bytes, workdir: str, artifacts: Iterable[str]) -> bytes:
    """The diff without files at the artifacts' paths, which are already in the sandbox. Call this
    through `limited_process.read`. A malformed diff is returned whole, for the grader to refuse."""
    inside = [posixpath.relpath(path, workdir).encode() for path in artifacts]
    contains_workdir = any(set(path.split(b"/")) <= {b".", b".."} for path in inside)
    try:
        files = parse(patch)
    except MalformedDiff:
        return patch
    if contains_workdir:
        return b""
    return b"".join(
        file.raw
        for file in files
        if not any((file.new_path + b"/").startswith(path + b"/") for path in inside)
    )


def _check_finished(sandbox: Sandbox, done: ExecResult) -> ExecResult:
    """Raises: SandboxLost, RetryHere if the command did not end by itself or by its own output."""
    if done.status.state is ExecState.LOST or done.status.cause == "sandbox":
        raise SandboxLost(f"a transfer of artifacts in {sandbox.identity} has no result")
    if done.status.cause == "timeout":
        raise RetryHere(
            f"a transfer of artifacts in {sandbox.identity} took more than {TRANSFER_TIMEOUT_S:.0f} s",
            boundary=Boundary.SANDBOX,
        )
    return done


# GNU tar creates links that lead out of a folder last, so it writes no member through one. The
# archive is read from an open file, because an artifact may be the folder that contains it. The
# repository of the workdir is moved away, because git would run what a hostile one configures.
_UNPACK_SCRIPT = r"""
cd / || exit 1
archive=/proc/self/fd/9 workdir=$1 git= found=()
exec 9<"$0" && rm -f -- "$0" || exit 1
shift
tar --ignore-zeros -tf "$archive" >/dev/null || exit 1
for path in "$@"; do
  tar --ignore-zeros -tf "$archive" -- "$path" >/dev/null 2>&1 || continue
  found+=("$path")
  case "$workdir/" in "/$path/"*) [ ! -d "$workdir/.git" ] || git=$0.git ;; esac
done
[ -z "$git" ] || mv -- "$workdir/.git" "$git" || exit 1
for path in "${found[@]}"; do
  rm -rf -- "$path" 2>/dev/null  # a mount point stays, empty
  [ ! -e "$path" ] || [ -z "$(ls -A -- "$path")" ] || exit 1
done
[ "${#found[@]}" = 0 ] || tar --ignore-zeros --no-same-owner -xf "$archive" -- "${found[@]}" || exit 1
[ -n "$git" ] || exit 0
mkdir -p -- "$workdir" && rm -rf -- "$workdir/.git" && mv -- "$git" "$workdir/.git"
"""
