"""The filter of diffs: files are dropped or flagged whole; diffs are refused or tampered."""

import pytest

from perdure.errors import InstanceError
from perdure.graders.diff import patch_filter
from perdure.graders.diff.patch_filter import filter_patch
from perdure.testing.grader_contract import BASE, GOLD, Edits, diff_of, tiny_instance


def test_keeps_the_fix_byte_for_byte() -> None:
    """A diff that touches only sources passes through unchanged."""
    diff = diff_of({**GOLD, "new.py": b"caf\xe9\r\n"})

    filtered = filter_patch(diff, tiny_instance())

    assert (filtered.data, filtered.dropped_paths, filtered.refused) == (diff, (), None)


@pytest.mark.parametrize(
    "path",
    [
        "tests/test_core.py",
        "tests/test_more.py",
        "tests/test_more.py/inside",
        "conftest.py",
        "deep/er/conftest.py",
        "pytest.ini",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "sitecustomize.py",
        "lib/evil.pth",
        "src/x.egg-info/entry_points.txt",
        "_pytest/__init__.py",
        ".gitattributes",
        "calc/__pycache__/core.cpython-311.pyc",
        "tests/test_old.py",
    ],
)
def test_drops_what_decides_the_tests(path: str) -> None:
    """Hidden tests and files that control the runner are dropped and recorded."""
    filtered = filter_patch(diff_of({**GOLD, path: "x\n"}), tiny_instance())

    assert filtered.data == diff_of(GOLD)
    assert filtered.dropped_paths == (path,)


def test_keeps_what_gold_touches() -> None:
    """The agent may edit a configuration file if the reference fix does."""
    instance = tiny_instance().model_copy(update={"gold_patch": diff_of({"setup.cfg": "[x]\n"})})

    filtered = filter_patch(diff_of({"setup.cfg": "[y]\n"}), instance)

    assert (filtered.dropped_paths, filtered.flagged_paths) == ((), ())
    assert b"setup.cfg" in filtered.data


def test_flags_what_a_fix_seldom_touches() -> None:
    """Build files, configuration and folders outside the fix are applied, and listed for audits."""
    edits: Edits = {
        "setup.py": "x\n",
        "calc/a.so": b"\0",
        "calc/deep/new.py": "",
        "other/new.py": "x\n",
    }
    filtered = filter_patch(diff_of(edits), tiny_instance())

    assert filtered.flagged_paths == ("calc/a.so", "other/new.py", "setup.py")
    assert filtered.data


def test_a_rows_globs_decide_what_is_graded() -> None:
    """`*` matches `/`, as in `git apply --exclude`, so no test support can be edited."""
    edits = {**GOLD, "tests/deep/support.py": "x\n", "tests/util.py": "x\n"}
    excluded = filter_patch(diff_of(edits), tiny_instance(patch_exclude=("tests/*",)))
    included = filter_patch(diff_of(edits), tiny_instance(patch_include=("calc/*",)))

    assert excluded.data == included.data == diff_of(GOLD)
    assert excluded.dropped_paths == ("tests/deep/support.py", "tests/util.py")


def test_tells_empty_before_from_empty_after() -> None:
    """An empty diff and a diff whose files were all dropped give different records."""
    nothing = filter_patch(b"", tiny_instance())
    all_dropped = filter_patch(diff_of({"conftest.py": "x\n"}), tiny_instance())

    assert (nothing.data, nothing.was_empty) == (b"", True)
    assert (all_dropped.data, all_dropped.was_empty) == (b"", False)


@pytest.mark.parametrize(
    ("target", "stays"),
    [("core.py", True), ("../setup.cfg", True), ("./.././x", True), ("../..", False), ("../../calc", False), ("/testbed", False), ("a\nb", False), ("a/../b", False), ("../calc/../x", False)],
)  # fmt: skip
def test_symlinks_that_leave_are_dropped(target: str, stays: bool) -> None:
    """Symlinks may point anywhere in the tree; others are dropped and recorded, and the fix stays."""
    filtered = filter_patch(diff_of({**GOLD, "calc/link": f"-> {target}"}), tiny_instance())

    assert filtered.dropped_paths == (() if stays else ("calc/link",))
    assert stays or filtered.data == diff_of(GOLD)


def test_chains_of_symlinks_do_not_leave() -> None:
    """If two links leave the tree only together, the one that goes up is dropped."""
    chain = {"a": "-> .", "x": "-> a/../etc/passwd", "calc/b": "-> ..", "y": "-> calc/b/b/../.."}

    filtered = filter_patch(diff_of(chain), tiny_instance())

    assert filtered.dropped_paths == ("x", "y")


def test_drops_a_symlink_that_cannot_be_read() -> None:
    """An edit of a link that shows only part of its target is dropped."""
    base = {**BASE, "calc/link": "-> a\nb\nc"}

    filtered = filter_patch(diff_of({"calc/link": "-> a\nb\nd"}, base), tiny_instance())

    assert filtered.dropped_paths == ("calc/link",)


def test_refuses_too_large_a_diff(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diff above either limit is refused as a whole, never cut."""
    diff = diff_of({"a.py": "x\n", "b.py": "y\n"})

    monkeypatch.setattr(patch_filter, "MAX_FILES", 1)
    files = filter_patch(diff, tiny_instance())
    monkeypatch.setattr(patch_filter, "MAX_BYTES", 10)
    size = filter_patch(diff, tiny_instance())

    assert (files.refused, size.refused) == ("patch_too_large: 2 files", f"patch_too_large: {len(diff)} bytes")  # fmt: skip
    assert files.data == size.data == b""


def test_defective_row_is_named() -> None:
    """An unreadable diff of the row itself is a data error that names the field."""
    with pytest.raises(InstanceError, match="test_patch"):
        filter_patch(b"", tiny_instance(test_patch=b"see attachment"))
