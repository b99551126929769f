"""Moves an instance's artifacts from the agent's sandbox to the sandbox of a separate verifier.

They are a tar from a sandbox in which hostile code was root, so the host stores it and never reads
it.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from perdure.errors import Boundary, InstanceError, RetryHere, SandboxLost
from perdure.sandboxes.base import ExecResult, ExecState, Sandbox

TRANSFER_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class PackedArtifacts:
    """A tar of the artifacts that exist. `refused`: why there is no tar."""

    data: bytes
    refused: str = ""


async def pack_artifacts(
    sandbox: Sandbox, artifacts: Mapping[str, tuple[str, ...]]
) -> PackedArtifacts:
    """Pack the artifacts that exist. Absent ones are left out, as in Harbor. Raises: SandboxLost,
    RetryHere."""
    lines = []
    for path, left_out in artifacts.items():
        options = shlex.join(f"--exclude={pattern}" for pattern in left_out)
        place, inside = shlex.quote(path), shlex.quote(path.strip("/"))
        lines.append(f"[ ! -e {place} ] || tar -C / {options} -cf - {inside} || exit 1")
    done = _check_finished(
        sandbox, await sandbox.exec("\n".join(lines), timeout=TRANSFER_TIMEOUT_S)
    )
    if done.status.cause == "output":
        return PackedArtifacts(b"", "artifacts_too_large: more than limits.output_mb")
    if not done.status.ok:
        said = done.stderr[-200:].decode("utf-8", "replace").strip()
        return PackedArtifacts(b"", f"the artifacts cannot be packed: {said or done.status}")
    return PackedArtifacts(done.stdout)


async def unpack_artifacts(
    sandbox: Sandbox, artifacts: Mapping[str, tuple[str, ...]], packed: bytes
) -> str:
    """Replace the sandbox's files at the paths of the packed artifacts. Returns why the tar cannot
    be unpacked; empty if it was unpacked.

    Raises: InstanceError if the image has no tar; SandboxLost, RetryHere.
    """
    known = _check_finished(sandbox, await sandbox.exec("tar --help | grep -q ignore-zeros"))
    if not known.status.ok:
        raise InstanceError("the image of the tests lacks GNU tar, which unpacks the artifacts")
    archive = f"{sandbox.tmp}/.perdure-artifacts.tar"
    await sandbox.put(archive, packed)
    argv = ["bash", "-c", _UNPACK_SCRIPT, archive, *(path.strip("/") for path in artifacts)]
    done = _check_finished(sandbox, await sandbox.exec(argv, timeout=TRANSFER_TIMEOUT_S))
    said = done.stderr[-200:].decode("utf-8", "replace").strip()
    return "" if done.status.ok else f"the artifacts cannot be unpacked: {said or done.status}"


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


# GNU tar creates links that lead out of a folder last, so it writes no member through one.
_UNPACK_SCRIPT = r"""
cd / || exit 1
for path in "$@"; do
  if tar --ignore-zeros -tf "$0" -- "$path" >/dev/null 2>&1; then rm -rf -- "$path" || exit 1; fi
done
tar --ignore-zeros --no-same-owner -xf "$0" && rm -f -- "$0"
"""
