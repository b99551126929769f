"""Patches of a Debian source package become CPython rows."""

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from perdure.errors import InstanceError
from perdure.instances import base_trees
from perdure.instances.recipes.dataset_recipe import PatchSeries
from perdure.instances.recipes.patch_series import PatchRow, message_of, patches_of
from perdure.storage.local_store import LocalStore
from perdure.types import Instance

UPSTREAM = {
    "Lib/zip.py": "one\n",
    "Lib/test/test_zip.py": "one\n",
    "Lib/test/test_email/test_email.py": "one\n",
    "Python/zip.c": "one\n",
}
SECOND = """From 0123456789 Mon Sep 17 00:00:00 2001
From: Some One <one@example.org>
Date: Mon, 1 Jan 2024 00:00:00 +0000
Subject: [PATCH] [3.11] gh-12: Zips are two (GH-34)
 (#56)

They were one.
(cherry picked from commit 89abcdef)

Co-authored-by: Other <other@example.org>
---
 Lib/zip.py | 2 +-

--- a/Lib/zip.py
+++ b/Lib/zip.py
@@ -1 +1 @@
-one
+two
--- a/Lib/test/test_zip.py
+++ b/Lib/test/test_zip.py
@@ -1 +1 @@
-one
+two
--- a/Lib/test/test_email/test_email.py
+++ b/Lib/test/test_email/test_email.py
@@ -1 +1 @@
-one
+two
"""
THIRD = """Zips are three

--- x.orig/Lib/zip.py
+++ x/Lib/zip.py
@@ -1 +1 @@
-two
+three
"""
COMPILED = """The compiler's

Index: x/Python/zip.c
--- x.orig/Python/zip.c
+++ x/Python/zip.c
@@ -1 +1 @@
-one
+two
"""
PATCHES = {
    "own.diff": "not for this tree",
    "0002-x.patch": SECOND,
    "3.diff": THIRD,
    "c.diff": COMPILED,
}


def packed(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def debian(**files: str) -> bytes:
    series = "# Debian's own\nown.diff\n\n0002-x.patch\n3.diff -p1\nc.diff\n"
    return packed(
        {"debian/patches/series": series, **{f"debian/patches/{n}": t for n, t in files.items()}}
    )


@pytest.fixture
def series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PatchSeries:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    archives = {}
    made = {
        "upstream": packed({f"x/{n}": t for n, t in UPSTREAM.items()}),
        "packaging": debian(**PATCHES),
    }
    for name, data in made.items():
        (tmp_path / name).write_bytes(data)
        url = (tmp_path / name).as_uri()
        archives[name] = {"url": url, "sha256": hashlib.sha256(data).hexdigest()}
    return PatchSeries.model_validate(
        {
            "package": "python3.11",
            "version": "3.11.2-6",
            "repo": "python/cpython",
            **archives,
            "first": "0002-x.patch",
            "install": ["make"],
            "test_cmd": "./python -m test {modules}",
            "rows": ["0002-x.patch"],
        }
    )


async def made(series: PatchSeries, patch: str, tmp_path: Path) -> Instance:
    return await PatchRow(series, patch).make("d", LocalStore(tmp_path / "store"))


async def test_a_patch_becomes_a_row(series: PatchSeries, tmp_path: Path) -> None:
    """The tree before it, its hidden tests, its fix as gold, its author's description."""
    instance = await made(series, "0002-x.patch", tmp_path)
    await base_trees.fetch(instance.source, tmp_path / "tree", LocalStore(tmp_path / "store"))

    assert instance.instance_id == "python__cpython-0002-x"
    assert instance.grading.eval_cmd == "./python -m test test_email test_zip"
    assert instance.grading.test_patch.count(b"diff --git") == 2
    assert instance.gold_patch.count(b"diff --git a/Lib/zip.py") == 1
    assert instance.grading.patch_exclude == ("Lib/test/*",)
    assert instance.environment.install == ("make",)
    assert instance.problem_statement == (
        "This repository is python/cpython 3.11.2. Make the change that this describes:\n\n"
        "gh-12: Zips are two\n\nThey were one.\n"
    )
    assert (tmp_path / "tree" / "Lib" / "zip.py").read_text() == "one\n"


async def test_what_is_compiled_is_the_same_in_all_rows(
    series: PatchSeries, tmp_path: Path
) -> None:
    """Patches of C come first, so one build of the interpreter serves every row."""
    instance = await made(series, "0002-x.patch", tmp_path)
    await base_trees.fetch(instance.source, tmp_path / "tree", LocalStore(tmp_path / "store"))

    assert (tmp_path / "tree" / "Python" / "zip.c").read_text() == "two\n"


async def test_the_same_package_makes_the_same_commits(
    series: PatchSeries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's commits do not depend on the home."""
    first = await made(series, "0002-x.patch", tmp_path)
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "other"))
    second = await made(series, "0002-x.patch", tmp_path)

    assert first.source.url != second.source.url
    assert (first.base_commit, first.metadata) == (second.base_commit, second.metadata)


@pytest.mark.parametrize(
    ("patch", "complaint"), [("3.diff", "changes no test module"), ("gone.diff", r"gone\.diff")]
)
async def test_a_patch_that_is_no_row_is_named(
    series: PatchSeries, tmp_path: Path, patch: str, complaint: str
) -> None:
    """The patch has no tests, or is not in the package."""
    with pytest.raises(InstanceError, match=complaint):
        await made(series, patch, tmp_path)


def test_a_series_without_its_patch_is_refused() -> None:
    """Another version of the package may have renamed or dropped it."""
    with pytest.raises(InstanceError, match=r"no patch 'gone\.diff'"):
        patches_of(debian(), "gone.diff")
    with pytest.raises(InstanceError, match=r"no file debian/patches/3\.diff"):
        patches_of(debian(), "3.diff")


def test_debians_own_fields_are_no_words() -> None:
    """Debian's header fields are not part of the agent's task."""
    patch = (
        b"Origin: upstream, abc\nBug: x\nDescription: Reject it\n Really.\n\ndiff --git a/x b/x\n"
    )

    assert message_of(patch) == "Reject it Really.\n"
