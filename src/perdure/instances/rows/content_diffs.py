"""Makes git diffs from contents, for rows that have files instead of diffs."""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from perdure.instances import host_git


def added_file(path: str, data: bytes) -> bytes:
    """A git diff that adds one text file."""
    if not data:
        nothing, empty = "0" * 40, "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
        return (
            f"diff --git a/{path} b/{path}\nnew file mode 100644\nindex {nothing}..{empty}\n"
        ).encode()
    lines = data.split(b"\n")
    ends_clean = lines[-1] == b""
    lines = lines[:-1] if ends_clean else lines
    head = (
        f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(lines)} @@\n"
    )
    body = b"".join(b"+" + line + b"\n" for line in lines)
    return head.encode() + body + (b"" if ends_clean else b"\\ No newline at end of file\n")


def is_inside(path: object) -> bool:
    """A relative path that stays below its folder."""
    return (
        isinstance(path, str)
        and bool(path)
        and path[0] != "/"
        and ".." not in PurePosixPath(path).parts
    )


def difference(before: Mapping[str, str], after: Mapping[str, str]) -> bytes:
    """The git diff between two sets of files. All paths must be `is_inside`."""
    with TemporaryDirectory() as folder:
        tree = Path(folder)
        _write(tree, before)
        host_git.commit_all(tree)
        for path in before.keys() - after.keys():
            (tree / path).unlink()
        _write(tree, after)
        return host_git.diff(tree, tree, sorted({*before, *after}))


def _write(tree: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
