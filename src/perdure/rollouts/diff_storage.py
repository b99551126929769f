"""Writes a captured diff into the attempt's folder."""

import hashlib

from perdure.graders.diff.diff_capture import CapturedPatch
from perdure.rollouts.attempt_job import Job
from perdure.types import PatchRef


async def store_diff(job: Job, name: str, captured: CapturedPatch) -> PatchRef:
    """The stored diff. If an earlier try has written one under this name, that one counts.

    Raises: StoreUnavailable.
    """
    key, store = job.key(name), job.services.store
    if not await store.put_if_absent(key, captured.data):
        captured = captured.with_data((await store.get(key)).data)
    return PatchRef(
        key=key,
        sha256=hashlib.sha256(captured.data).hexdigest(),
        size=len(captured.data),
        empty=not captured.data,
        files=captured.files,
        ignored_files=captured.ignored_files,
        too_large=captured.too_large,
        dropped=captured.dropped,
        refused=captured.refused,
    )
