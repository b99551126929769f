"""Numbers the lines that a test patch adds, and exchanges some of them."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from perdure.errors import InstanceError
from perdure.graders.diff.git_diff_parser import FileDiff, parse
from perdure.types import Twin

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_INDEX = re.compile(rb"^index [0-9a-f]+\.\.[0-9a-f]+(?: \d+)?\n", re.MULTILINE)


def added_lines(test_patch: bytes) -> dict[str, frozenset[int]]:
    """Path -> numbers (1-based) of the lines that the patch adds to each text file.

    Raises: MalformedDiff.
    """
    found = {}
    for file in parse(test_patch):
        numbers = frozenset(number for _, kind, number in _numbered(file.raw) if kind == b"+")
        if numbers and not file.binary:
            found[_path(file)] = numbers
    return found


def changed_lines(patch: bytes) -> dict[str, frozenset[int]]:
    """Path -> numbers of the lines of each text file that the patch adds, and of the lines around
    each removed one.

    Raises: MalformedDiff.
    """
    found = {}
    for file in parse(patch):
        numbers: set[int] = set()
        for _, kind, number in _numbered(file.raw):
            if kind in (b"+", b"-"):
                numbers |= {number} if kind == b"+" else {number - 1, number}
        if not (file.binary or file.deleted or file.makes_link):
            found[_path(file)] = frozenset(numbers)
    return found


def with_twins(test_patch: bytes, twins: Sequence[Twin]) -> bytes:
    """The test patch with these twins. It has no index lines, because they hold the digest of a
    file, which would reveal a twin.

    Raises: InstanceError if a twin belongs to another test patch.
    """
    parts = []
    missing = set(twins)
    for file in parse(test_patch):
        own = {twin.line: twin for twin in twins if twin.path == _path(file)}
        parts.append(without_index(file) if not own else _exchanged(file, own, missing))
    if missing:
        twin = sorted(missing, key=lambda twin: (twin.path, twin.line))[0]
        raise InstanceError(
            f"`grading.twins`: line {twin.line} of {twin.path} differs from `test_patch`: "
            "calibrate the instance again"
        )
    return b"".join(parts)


def _exchanged(file: FileDiff, own: dict[int, Twin], missing: set[Twin]) -> bytes:
    lines = []
    for line, kind, number in _numbered(without_index(file)):
        twin = own.get(number) if kind == b"+" else None
        if twin is not None and line == b"+" + twin.before + b"\n":
            missing.discard(twin)
            lines.append(b"+" + twin.after + b"\n")
        else:
            lines.append(line)
    return b"".join(lines)


class Hunk(NamedTuple):
    """One hunk of a file's part. `lines` begin with `+`, `-`, a space or a backslash."""

    match: re.Match[bytes]
    rest: bytes
    """What follows the numbers in its first line."""
    lines: tuple[bytes, ...]

    def header(self, moved: int, added: int) -> bytes:
        """Its first line, if `moved` lines are added above it and `added` lines in it."""
        old, count, first, size = (self.match[n] for n in (1, 2, 3, 4))
        more = int(size or 1) + added
        old_range = old + (b"," + count if count else b"")
        return b"@@ -%s +%d,%d @@%s" % (old_range, int(first) + moved, more, self.rest)


def hunks(file: FileDiff) -> tuple[bytes, list[Hunk]]:
    """What precedes the first hunk, without index lines, and the hunks."""
    found: list[Hunk] = []
    head = b""
    for line, kind, _ in _numbered(without_index(file)):
        if not kind and (match := _HUNK.match(line)):
            found.append(Hunk(match, line[match.end() :], ()))
        elif found:
            found[-1] = found[-1]._replace(lines=(*found[-1].lines, line))
        else:
            head += line
    return head, found


def without_index(file: FileDiff) -> bytes:
    """The file's part without its index lines, which hold digests."""
    if file.binary:
        return file.raw
    head, hunk, rest = file.raw.partition(b"\n@@ ")
    # Nothing is lost with the mode in an index line: separate lines give a change of mode.
    return _INDEX.sub(b"", head + b"\n") + hunk[1:] + rest if hunk else file.raw


def _path(file: FileDiff) -> str:
    return file.new_path.decode("utf-8", "surrogateescape")


def _numbered(raw: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    """Each line of a file's part with its sign and its number in the new file: for a removed line,
    that of the next one. Lines outside hunks have no sign."""
    number = old_left = new_left = 0
    for line in _split(raw):
        if old_left <= 0 and new_left <= 0:
            if match := _HUNK.match(line):
                old_left, number = int(match[2] or 1), int(match[3])
                new_left = int(match[4] or 1)
            yield line, b"", 0
            continue
        kind = line[:1]
        if kind == b"\\":
            yield line, b"", 0
            continue
        yield line, kind, number
        old_left -= kind != b"+"
        new_left -= kind != b"-"
        number += kind != b"-"


def _split(raw: bytes) -> list[bytes]:
    """Split only at newlines: a carriage return is content."""
    lines = raw.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
