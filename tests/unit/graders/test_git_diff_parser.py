"""The diff parser loses no byte, guesses nothing, and never sees fewer files than git does."""

import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.graders.diff.git_diff_parser import MalformedDiff, parse, paths_of
from perdure.testing.grader_contract import diff_of

TEXT = b"diff --git a/x b/x\nindex 1234567..89abcde 100644\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
RENAME = (
    b"diff --git a/old name b/new\nsimilarity index 100%\nrename from old name\nrename to new\n"
)
QUOTED = b'diff --git "a/\\303\\274\\t" "b/\\303\\274\\t"\nold mode 100644\nnew mode 100755\n'
BINARY = b"diff --git a/i b/i\nnew file mode 100644\nindex 0000000..1111111\nGIT binary patch\nliteral 1\nIcmZPo000310RR91\n\nliteral 0\nHcmV?d00001\n\n"

NAMES = st.text(st.sampled_from('ab/ -.\t"\\é\n'), min_size=1, max_size=8).filter(
    lambda name: all(part not in ("", ".", "..") for part in name.split("/"))
)
CONTENTS = st.one_of(
    st.none(),
    st.binary(max_size=40).filter(lambda data: not data.startswith(b"-> ")),
    st.lists(st.sampled_from(["", "a", "- b", "+ c", "@@ -1 +1 @@", "diff --git a/x b/x", "\r"])).map(
        lambda lines: "\n".join(lines).encode()
    ),
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(NAMES, CONTENTS, min_size=1, max_size=4), st.data())
def test_reads_what_git_writes(edits: dict[str, bytes | None], data: st.DataObject) -> None:
    """The parts of git's own diffs join to the input, and name exactly the edited paths."""
    names = [n for n in edits if not any(o != n and o.startswith(n + "/") for o in edits)]
    before = {name: data.draw(CONTENTS) for name in names}
    after = {name: edits[name] for name in names if edits[name] != before[name]}
    diff = diff_of(after, {"kept": b"x", **before})

    files = parse(diff)

    assert b"".join(file.raw for file in files) == diff
    assert paths_of(diff) == {name.encode() for name in after}


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([TEXT, RENAME, QUOTED, BINARY]), min_size=1), st.data())
def test_any_bytes_round_trip_or_are_refused(parts: list[bytes], data: st.DataObject) -> None:
    """For any damaged diff, either the parts join to the input or the parser refuses it."""
    diff = _mangled(b"".join(parts), data)
    try:
        files = parse(diff)
    except MalformedDiff:
        return
    assert b"".join(file.raw for file in files) == diff


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([TEXT, RENAME, QUOTED]), min_size=1, max_size=3), st.data())
def test_sees_every_file_that_git_sees(parts: list[bytes], data: st.DataObject) -> None:
    """If both accept a damaged diff, git touches no path that the parser did not report."""
    diff = _mangled(b"".join(parts), data)
    try:
        seen = paths_of(diff)
    except MalformedDiff:
        return
    assert _git_paths(diff) <= seen


def _mangled(diff: bytes, data: st.DataObject) -> bytes:
    """Remove, repeat or swap lines, or insert bytes in the middle."""
    lines = diff.splitlines(keepends=True)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        new = st.sampled_from([b"", b"\n", b"--- a/y\n+++ b/y\n", b"--- y\n", b"\\ No newline\n", b"diff --git a/z b/z\n", b"new mode 100755\n", b"rename to y\n", *lines])  # fmt: skip
        lines[at : at + data.draw(st.integers(0, 1))] = [data.draw(new)]
    return b"".join(lines)


def _git_paths(diff: bytes) -> set[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "patch").write_bytes(diff)
        shown = subprocess.run(
            ["git", "apply", "--numstat", "-z", "patch"],
            cwd=folder,
            capture_output=True,
            check=False,
        )
    return {line.split(b"\t", 2)[2] for line in shown.stdout.split(b"\0") if line}


@pytest.mark.parametrize(
    "diff",
    [
        b"hello\n",
        b"\n" + TEXT,
        TEXT + b"junk\n",
        TEXT + b"--- x\n+++ x\n@@ -1 +1 @@\n-a\n+b\n",
        TEXT.replace(b"+++ b/x", b"+++ b/y"),
        TEXT.replace(b"-1 +1", b"-1,2 +1"),
        TEXT.replace(b"a/x b/x", b"a/x b/y"),
        RENAME.replace(b"rename to new", b"rename to other"),
        QUOTED.replace(b"\\t", b"\\q"),
        BINARY.replace(b"\n\nliteral 0", b"\nliteral 0"),
        b"diff --git a/x b/x\nnew mode 1\n",
        QUOTED + b"new mode 100644\n",
    ],
)
def test_refuses_what_git_would_not_write(diff: bytes) -> None:
    """Bytes other than a diff in git's form are refused, never skipped."""
    with pytest.raises(MalformedDiff, match=r"line \d+"):
        parse(diff)


def test_reads_modes_links_and_binaries() -> None:
    """The parser reports modes, symlink targets and missing binary content."""
    files = {file.new_path: file for file in parse(diff_of({"l": "-> a/b", "i": b"\0\1"}) + TEXT)}
    bare = parse(b"diff --git a/i b/i\nindex 1234..5678 100644\nBinary files a/i and b/i differ\n")[
        0
    ]

    assert (files[b"l"].link_target, files[b"l"].modes) == (
        b"a/b",
        frozenset([b"120000"]),
    )
    assert (files[b"i"].binary, files[b"i"].lacks_content) == (True, False)
    assert (bare.binary, bare.lacks_content) == (True, True)
    assert files[b"x"].link_target is None


def test_names_full_of_separators_cost_no_more_than_others() -> None:
    """The title is split by its meaning, not by trying every ` b/` in it."""
    hostile, plain = _long_names("x b/"), _long_names("x_b/")

    assert _cpu_of(hostile) <= 5 * _cpu_of(plain) + 0.03


def _long_names(folder: str) -> bytes:
    names = (f"{folder * 900}{n}" for n in range(60))
    return "".join(
        f"diff --git a/{name} b/{name}\nold mode 100644\nnew mode 100755\n" for name in names
    ).encode()


def _cpu_of(diff: bytes) -> float:
    started = time.process_time()
    assert len(parse(diff)) == 60
    return time.process_time() - started


@pytest.mark.parametrize(
    ("title", "more", "paths"),
    [
        (b"a/x b/x b/x b/x", b"", (b"x b/x", b"x b/x")),
        (b'"a/\\303\\274" "b/\\303\\274"', b"", ("ü".encode(), "ü".encode())),
        (b'a/x "b/\\303\\274"', b"rename from x\nrename to \"\\303\\274\"\n", (b"x", "ü".encode())),
        (b'"a/\\303\\274" b/x y', b"rename from \"\\303\\274\"\nrename to x y\n", ("ü".encode(), b"x y")),
        (b"a/x b/y b/z", b"rename from x b/y\nrename to z\n", (b"x b/y", b"z")),
    ],
)  # fmt: skip
def test_reads_names_that_look_like_two(
    title: bytes, more: bytes, paths: tuple[bytes, bytes]
) -> None:
    """A title with spaces and quotes in its names has only one meaning."""
    (file,) = parse(
        b"diff --git " + title + b"\n" + (more or b"old mode 100644\nnew mode 100755\n")
    )

    assert (file.old_path, file.new_path) == paths
