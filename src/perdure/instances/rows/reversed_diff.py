"""Reverses a git diff, as `git apply --reverse` would, without a tree."""

import re
from collections.abc import Iterator

_HUNK = re.compile(rb"@@ -(\d+(?:,(\d+))?) \+(\d+(?:,(\d+))?) @@(.*)", re.DOTALL)
_SWAPPED = {
    b"old mode ": b"new mode ",
    b"new mode ": b"old mode ",
    b"new file mode ": b"deleted file mode ",
    b"deleted file mode ": b"new file mode ",
    b"rename from ": b"rename to ",
    b"rename to ": b"rename from ",
    b"--- ": b"+++ ",
    b"+++ ": b"--- ",
}
_FIRST = (b"old mode ", b"rename from ", b"--- ")
"""The first line of each pair of header lines that git writes."""


class Irreversible(ValueError):
    """The diff lacks data that its reverse needs, or is not a git diff."""


def reversed_diff(diff: bytes) -> bytes:
    """Raises: Irreversible for binary files, copies, and bytes that are not a git diff."""
    lines: list[bytes] = []
    for line in diff.removesuffix(b"\n").split(b"\n"):
        if (
            line.startswith(b"\\ ") and lines
        ):  # no newline at the end of the file: of the line before
            lines[-1] += b"\n" + line
        else:
            lines.append(line)
    if not lines[0].startswith(b"diff --git "):
        raise Irreversible("it does not begin with `diff --git`")
    return b"".join(line + b"\n" for line in _reversed(iter(lines)))


def _reversed(lines: Iterator[bytes]) -> Iterator[bytes]:
    for line in lines:
        if line.startswith(b"diff --git "):
            yield _git_line(line)
        elif hunk := _HUNK.fullmatch(line):
            yield b"@@ -%b +%b @@%b" % (hunk[3], hunk[1], hunk[5])
            yield from _body(lines, _count(hunk[2]), _count(hunk[4]))
        elif line.startswith((b"Binary files ", b"GIT binary patch", b"copy ")):
            raise Irreversible(f"{line.decode('utf-8', 'replace')!r} cannot be reversed")
        elif line.startswith(b"index "):
            before, _, after = line[6:].partition(b"..")
            after, space, mode = after.partition(b" ")
            yield b"index %b..%b%b%b" % (after, before, space, mode)
        elif line.startswith(_FIRST):  # swap the whole pair, to keep git's order of lines
            yield _header(next(lines, b""))
            yield _header(line)
        else:
            yield _header(line)


def _count(written: bytes | None) -> int:
    return 1 if written is None else int(written)


def _header(line: bytes) -> bytes:
    for before, after in _SWAPPED.items():
        if line.startswith(before):
            rest = line[len(before) :]
            sides = (b"a/", b"b/") if before == b"--- " else (b"b/", b"a/")
            return after + (_other_side(rest, *sides) if before in (b"--- ", b"+++ ") else rest)
    return line


def _other_side(name: bytes, before: bytes, after: bytes) -> bytes:
    quote = b'"' if name.startswith(b'"') else b""
    bare = name[len(quote) :]
    return quote + after + bare[2:] if bare.startswith(before) else name


def _git_line(line: bytes) -> bytes:
    """`diff --git a/X b/Y` -> `diff --git a/Y b/X`; the names differ only for a rename."""
    names = line[len(b"diff --git ") :]
    for place in (match.start() for match in re.finditer(rb" \"?b/", names)):
        old, new = names[:place], names[place + 1 :]
        if _other_side(old, b"a/", b"b/") == new:
            return line
    found = re.fullmatch(rb'("a/.*"|a/\S+) ("b/.*"|b/\S+)', names)
    if found is None:
        raise Irreversible(f"{line.decode('utf-8', 'replace')!r} names two files ambiguously")
    swapped = (_other_side(found[2], b"b/", b"a/"), _other_side(found[1], b"a/", b"b/"))
    return b"diff --git %b %b" % swapped


def _body(lines: Iterator[bytes], old: int, new: int) -> Iterator[bytes]:
    """The reversed lines of a hunk. Added lines become removed ones and come first, as in git."""
    added: list[bytes] = []
    removed: list[bytes] = []
    while old > 0 or new > 0:
        line = next(lines, None)
        kind = None if line is None else line[:1]
        if line is None or kind not in (b"+", b"-", b" ", b""):
            raise Irreversible("a hunk is cut short")
        old, new = old - (kind != b"+"), new - (kind != b"-")
        if kind == b"+":
            added.append(b"-" + line[1:])
        elif kind == b"-":
            removed.append(b"+" + line[1:])
        else:
            yield from (*added, *removed, line)
            added, removed = [], []
    yield from (*added, *removed)
