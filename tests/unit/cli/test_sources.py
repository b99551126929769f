"""What `perdure run SOURCE` reads, and which of its rows matter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.runs.instance_selection import resolve
from perdure.errors import InstanceError
from perdure.instances.rows.row_choice import Choice
from perdure.storage.local_store import LocalStore
from tests.hub_cache import cached

ROW: dict[str, Any] = {
    "problem_statement": "fix it",
    "version": "1.0",
    "patch": "diff --git a/x b/x\n",
    "test_patch": "diff --git a/t b/t\n",
    "test_cmd": "pytest -rA t.py",
    "FAIL_TO_PASS": ["t"],
}
IDS = ("astropy__astropy-1", "django__django-1", "django__django-2")


@pytest.mark.filterwarnings("ignore")
def test_a_public_set_needs_no_word_but_its_name(tmp_path: Path) -> None:
    """Offline, from the library's cache: the recipe knows the hub's name, split, format and image."""
    rows = [{**ROW, "instance_id": one} for one in IDS]
    cached(tmp_path / "hf", "SWE-bench", "SWE-bench_Verified", rows)
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("PERDURE_", "TEMPORAL_"))
    }
    environment |= {
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
        "PERDURE_HOME": str(tmp_path / "home"),
    }
    words = ["run", "swe-bench-verified", "-i", "django__*", "--dry-run", "--json", "-a", "oracle"]
    words += ["--sandbox", "podman"]  # its rows are in images

    done = subprocess.run(
        [sys.executable, "-m", "perdure.cli.main", *words],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["instances"] == [f"swe-bench-verified/{one}" for one in IDS[1:]]


def file_with_a_bad_row(folder: Path) -> str:
    """Three rows; the last one lacks its patch."""
    rows = [{**ROW, "instance_id": one} for one in IDS]
    del rows[2]["patch"]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def test_a_bad_row_refuses_only_a_run_that_would_play_it(tmp_path: Path) -> None:
    """`-l 2` and `-i 'astropy*'` leave the third row out, so its fault does not matter."""
    store, path = LocalStore(tmp_path / "store"), file_with_a_bad_row(tmp_path)

    for choice in (Choice(limit=2), Choice(include=("astropy*",)), Choice(exclude=("*-2",))):
        assert (await resolve(store, path, choice)).refs is not None
    for choice in (Choice(), Choice(limit=3), Choice(include=("django*",))):
        with pytest.raises(InstanceError, match="row 3 lacks `patch`"):
            await resolve(store, path, choice)


async def test_a_folder_with_one_slash_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`data/mine` is there, so it is not a name of the hub."""
    folder = tmp_path / "data" / "mine"
    folder.mkdir(parents=True)
    (folder / "test.jsonl").write_text(json.dumps({**ROW, "instance_id": IDS[0]}))
    monkeypatch.chdir(tmp_path)

    found = await resolve(LocalStore(tmp_path / "store"), "data/mine")

    assert found.refs == (f"mine/{IDS[0]}",)
