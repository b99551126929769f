"""The reverse of a diff undoes every change of the diff."""

import json
from pathlib import Path

import pytest

from perdure.instances.rows.reversed_diff import Irreversible, reversed_diff
from perdure.testing.grader_contract import git, make_repository
from tests.checkout_paths import ROOT

REAL = ROOT.parent / "shared" / "data" / "tasks"
FILES = {
    "a.py": "one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\n",
    "gone.py": "x\n-- y\n++ z\n",
    "moved.py": "some\nlines\nthat\nmove\n",
    "end.py": "no newline",
    "crlf.txt": "a\r\nb\r\n",
    "mode.sh": "echo\n",
    "with space.py": "x\n",
    "caf\u00e9.py": "x\n",
}


def break_tree(tree: Path) -> None:
    (tree / "a.py").write_text("zero\none\nTWO\nthree\nfour\nfive\nsix\nseven\nnine\n")
    (tree / "gone.py").unlink()
    (tree / "new.py").write_text("--- a\n+++ b\n")
    (tree / "moved.py").rename(tree / "there.py")
    (tree / "end.py").write_text("other, no newline")
    (tree / "crlf.txt").write_bytes(b"a\r\nc\r\n")
    (tree / "mode.sh").chmod(0o755)
    (tree / "with space.py").write_text("x\ny")
    (tree / "caf\u00e9.py").write_text("")


@pytest.mark.parametrize("renames", ["--find-renames", "--no-renames"])
def test_the_reverse_restores_the_tree(tmp_path: Path, renames: str) -> None:
    """New, removed, moved and changed files, modes, line endings and odd names are restored."""
    make_repository(tmp_path, FILES)
    break_tree(tmp_path)
    git(tmp_path, "add", "-A")
    diff = git(tmp_path, "diff", "--cached", "--full-index", renames, "HEAD")
    (tmp_path / "gold.diff").write_bytes(reversed_diff(diff))

    git(tmp_path, "apply", "--index", "gold.diff")

    assert git(tmp_path, "diff", "--cached", "HEAD") == b""
    assert reversed_diff(reversed_diff(diff)) == diff


def test_a_binary_file_cannot_be_reversed() -> None:
    """A diff without the content is refused instead of losing a file."""
    diff = b"diff --git a/x b/x\nindex 1..2 100644\nBinary files a/x and b/x differ\n"
    with pytest.raises(Irreversible, match="Binary files"):
        reversed_diff(diff)


@pytest.mark.parametrize(
    "diff", [b"", b"hello\n", b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n"]
)
def test_what_is_no_diff_is_refused(diff: bytes) -> None:
    """Other text and a cut hunk are refused."""
    with pytest.raises(Irreversible):
        reversed_diff(diff)


@pytest.mark.parametrize(
    "file", ["swebench_rows.jsonl", "swe_gym_rows.jsonl", "swebench_sdist.jsonl"]
)
def test_twice_reversed_real_patches_are_as_published(file: str) -> None:
    """Patches of real rows, which GitHub wrote, survive two reversals."""
    if not (REAL / file).is_file():
        pytest.skip("the real rows are not here")
    for line in (REAL / file).read_text().splitlines():
        patch = json.loads(line)["patch"].encode()

        assert reversed_diff(reversed_diff(patch)) == patch
