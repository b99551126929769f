"""Where a captured diff is kept."""

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from perdure.graders.diff.diff_capture import CapturedPatch
from perdure.rollouts.diff_storage import store_diff
from perdure.storage.local_store import LocalStore


async def test_the_diff_of_an_earlier_try_counts(tmp_path: Path) -> None:
    """A try that died after its write has left bytes that may be graded already: reference and bytes
    must agree."""
    store = LocalStore(tmp_path)
    job: Any = SimpleNamespace(key=lambda name: f"a/{name}", services=SimpleNamespace(store=store))
    first = await store_diff(job, "patch.diff", CapturedPatch(data=b"diff one\n"))
    second = await store_diff(job, "patch.diff", CapturedPatch(data=b"another\n"))

    assert second == first
    assert (await store.get("a/patch.diff")).data == b"diff one\n"
    assert second.sha256 == hashlib.sha256(b"diff one\n").hexdigest()
