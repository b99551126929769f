"""Finds changes that an image's own setup made, which are not the agent's."""

import glob
import os

from perdure.errors import InstanceError
from perdure.sandboxes.base import Sandbox
from perdure.types import Instance, SourceKind

_STATUS = (
    "git -c safe.directory='*' -c core.fsmonitor=false status --porcelain -z --no-renames -uall"
)


async def without_image_edits(sandbox: Sandbox, instance: Instance) -> Instance:
    """The instance whose `patch_exclude` also names the files in which the image differs from the
    base commit. A diff of such a file contains the image's change too, so the filter drops the
    whole file and lists it in the grade's `dropped_paths`. Call this before applying anything.

    Raises: InstanceError when `git status` fails; SandboxLost.
    """
    if instance.source.kind is not SourceKind.IMAGE:
        return instance
    done = await sandbox.exec(["bash", "-c", _STATUS], cwd=sandbox.workdir)
    if not done.status.ok:
        said = done.stderr[-300:].decode("utf-8", "replace").strip()
        raise InstanceError(f"{instance.ref}: `git status` failed in the image's tree: {said}")
    entries = [entry for entry in done.stdout.split(b"\0") if len(entry) > 3]
    dirty = [glob.escape(os.fsdecode(entry[3:])) for entry in entries]
    grading = instance.grading
    changes = {"patch_exclude": (*grading.patch_exclude, *dirty)}
    return instance.model_copy(update={"grading": grading.model_copy(update=changes)})
