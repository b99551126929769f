"""A strict, byte-level parser of git diffs. It returns one part per file, keeps every byte and
guesses nothing.

It is strict because it and `git apply` must agree on which files a patch touches: a diff that it
cannot parse never reaches `git apply`. `patch_filter.py` judges the result. Hostile code writes the diff,
so parsing takes time linear in its length.
"""

import re
from dataclasses import dataclass, field

REGULAR = b"100644"
EXECUTABLE = b"100755"
SYMLINK = b"120000"


class MalformedDiff(ValueError):
    """The bytes are not a diff as git writes it; the message names the line."""


@dataclass(frozen=True)
class FileDiff:
    """One file's part of a diff. Joining the `raw` of all parts gives the input.

    Example:
        FileDiff(raw=b"diff --git a/x b/x\\n...", old_path=b"x", new_path=b"x", modes={b"100644"})
    """

    raw: bytes
    old_path: bytes
    new_path: bytes
    modes: frozenset[bytes] = frozenset()
    """Every mode that the part names, old and new."""
    added: bool = False
    deleted: bool = False
    moved: bool = False
    """A rename or a copy."""
    link_target: bytes | None = None
    """The target of a symlink; None if the file is no symlink, is removed, or the diff omits the
    target."""
    makes_link: bool = False
    """The file is a symlink afterwards."""
    binary: bool = False
    lacks_content: bool = False
    """`Binary files ... differ`: there is nothing to apply."""

    @property
    def paths(self) -> frozenset[bytes]:
        return frozenset((self.old_path, self.new_path))


def parse(diff: bytes) -> list[FileDiff]:
    """Split a diff into one part per file.

    Raises: MalformedDiff.
    """
    reader = _Reader(diff)
    files = []
    while not reader.at_end():
        files.append(_file(reader))
    return files


def paths_of(diff: bytes) -> frozenset[bytes]:
    """Every path that a diff names, old and new. Raises: MalformedDiff."""
    return frozenset(path for file in parse(diff) for path in file.paths)


def count_files(diff: bytes) -> int:
    """How many parts `parse` would find, counted without parsing."""
    return diff.count(b"\ndiff --git ") + diff.startswith(b"diff --git ")


class _Reader:
    """A cursor over lines: the current line with its newline, and where it starts."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.number = 0
        self.start = self._end = 0
        self.line = b""
        self.take()

    def at_end(self) -> bool:
        return not self.line

    def peek(self) -> bytes:
        """Empty at the end."""
        return self.line

    def take(self) -> bytes:
        self.number += 1
        self.start = self._end
        self._end = self.data.find(b"\n", self.start) + 1 or len(self.data)
        taken, self.line = self.line, self.data[self.start : self._end]
        return taken

    def take_rest_if_blank(self) -> None:
        """Dataset rows often end in empty lines, which git ignores."""
        if self.line == b"\n" and not self.data[self.start :].strip(b"\n"):
            self.start = self._end = len(self.data)
            self.line = b""

    def wrong(self, what: str) -> MalformedDiff:
        shown = self.line[:80].decode("utf-8", "backslashreplace").rstrip("\n")
        return MalformedDiff(f"line {self.number}: {what}: {shown!r}")


@dataclass
class _Header:
    old_path: bytes = b""
    new_path: bytes = b""
    modes: list[bytes] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    new_mode: bytes = b""
    """The file's mode after the change; empty if the diff names none or removes the file."""


_LONGEST_TITLE = 4 * 2 * 4096  # two paths of PATH_MAX bytes, each quoted
_MODE = rb"[0-7]{6}"
_EXTENDED = re.compile(
    rb"(?:(?P<mode>old mode|new mode|deleted file mode|new file mode) (?P<value>" + _MODE + rb")"
    rb"|(?P<move>rename from|rename to|copy from|copy to) (?P<path>.+)"
    rb"|(?P<score>similarity index|dissimilarity index) \d{1,3}%"
    rb"|(?P<index>index) [0-9a-f]{4,64}\.\.[0-9a-f]{4,64}(?: (?P<kept>" + _MODE + rb"))?)\n?"
)
_HUNK = re.compile(rb"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_BINARY_SIZE = re.compile(rb"(?:literal|delta) \d+\n")
_BASE85 = re.compile(rb"[A-Za-z][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]+\n")


def _file(reader: _Reader) -> FileDiff:
    start = reader.start
    if not reader.peek().startswith(b"diff --git "):
        raise reader.wrong("expected 'diff --git'")
    title = reader.take()[len(b"diff --git ") :].removesuffix(b"\n")
    header = _extended_headers(reader)
    _name_paths(reader, header, title)
    body = _body(reader, header)
    reader.take_rest_if_blank()
    return FileDiff(
        raw=reader.data[start : reader.start],
        old_path=header.old_path,
        new_path=header.new_path,
        modes=frozenset(header.modes),
        added=b"new file mode" in header.seen,
        deleted=b"deleted file mode" in header.seen,
        moved=bool(header.seen & {b"rename to", b"copy to"}),
        link_target=body.whole() if header.new_mode == SYMLINK else None,
        makes_link=header.new_mode == SYMLINK,
        binary=body.binary,
        lacks_content=body.lacks_content,
    )


def _extended_headers(reader: _Reader) -> _Header:
    header = _Header()
    while match := _EXTENDED.fullmatch(reader.peek()):
        kind = match["mode"] or match["move"] or match["score"] or match["index"]
        if kind in header.seen:
            raise reader.wrong("header given twice")
        header.seen.add(kind)
        if match["mode"] or match["kept"]:
            mode = match["value"] or match["kept"]
            header.modes.append(mode)
            if kind in (b"new mode", b"new file mode", b"index"):
                header.new_mode = mode
        elif match["move"]:
            side = "old_path" if kind.endswith(b"from") else "new_path"
            setattr(header, side, _unquoted(reader, match["path"]))
        reader.take()
    return header


def _name_paths(reader: _Reader, header: _Header, title: bytes) -> None:
    """Read both paths from the title; the lines of a rename must name the same paths."""
    if len(title) > _LONGEST_TITLE:
        raise reader.wrong("file name is too long")
    moved = bool(header.old_path or header.new_path)
    left, right = _split_title(reader, title, header.old_path if moved else None)
    old, new = _unquoted(reader, left), _unquoted(reader, right)
    paths = (old[2:], new[2:])
    agrees = paths == (header.old_path, header.new_path) if moved else paths[0] == paths[1]
    if not (old.startswith(b"a/") and new.startswith(b"b/") and agrees):
        raise reader.wrong("'diff --git' line names no single path")
    header.old_path, header.new_path = paths


def _split_title(reader: _Reader, title: bytes, old_path: bytes | None) -> tuple[bytes, bytes]:
    """The halves of `a/X b/Y`. Names may hold spaces, so three rules find the split: a quoted name
    ends at its quote, the old name of a rename is known, and otherwise both names are equal."""
    if title.startswith(b'"'):
        at = _closing_quote(reader, title) + 1
    elif old_path is not None:
        at = len(b"a/" + old_path)
    elif title.endswith(b'"'):  # an unquoted name contains no quote
        at = title.index(b'"') - 1
    else:
        at = len(title) // 2
    if title[at : at + 1] != b" ":
        raise reader.wrong("'diff --git' line names no single path")
    return title[:at], title[at + 1 :]


@dataclass
class _Body:
    """The facts about one part that the filter needs."""

    is_kept: bool = False
    """Keep the added lines: they are the target of a symlink."""
    added: list[bytes] = field(default_factory=list)
    partial: bool = False
    """The diff has context lines."""
    binary: bool = False
    lacks_content: bool = False

    def whole(self) -> bytes | None:
        """The new content, if the diff contains all of it."""
        return b"".join(self.added) if self.added and not self.partial else None

    def drop_newline(self) -> None:
        if self.added:
            self.added[-1] = self.added[-1].removesuffix(b"\n")


def _body(reader: _Reader, header: _Header) -> _Body:
    line = reader.peek()
    if line == b"GIT binary patch\n":
        reader.take()
        _binary(reader)
        return _Body(binary=True)
    if line.startswith(b"Binary files ") and line.rstrip(b"\n").endswith(b" differ"):
        reader.take()
        return _Body(binary=True, lacks_content=True)
    body = _Body(is_kept=header.new_mode == SYMLINK)
    if line.startswith(b"--- "):
        _check_name(reader, b"--- ", b"a/" + header.old_path, b"new file mode" in header.seen)
        _check_name(reader, b"+++ ", b"b/" + header.new_path, b"deleted file mode" in header.seen)
        _hunks(reader, body)
    return body


def _check_name(reader: _Reader, prefix: bytes, expected: bytes, absent: bool) -> None:
    line = reader.peek()
    name = line[len(prefix) :].removesuffix(b"\n").removesuffix(b"\t")
    if not line.startswith(prefix):
        raise reader.wrong(f"expected {prefix.decode()!r}")
    if _unquoted(reader, name) != (b"/dev/null" if absent else expected):
        raise reader.wrong("file name differs from the 'diff --git' line")
    reader.take()


def _hunks(reader: _Reader, body: _Body) -> None:
    if not _HUNK.match(reader.peek()):
        raise reader.wrong("expected '@@'")
    while match := _HUNK.match(reader.peek()):
        reader.take()
        _hunk(reader, _count(match[1]), _count(match[2]), body)


def _count(digits: bytes | None) -> int:
    return 1 if digits is None else int(digits[:12])


def _hunk(reader: _Reader, old: int, new: int, body: _Body) -> None:
    """Read exactly `old` and `new` lines, as git counts them."""
    last = b""
    while old > 0 or new > 0 or reader.peek().startswith(b"\\ "):
        line = reader.peek()
        sign = line[:1]
        if sign in (b" ", b"\n"):
            old, new, body.partial = old - 1, new - 1, True
        elif sign == b"-":
            old -= 1
        elif sign == b"+":
            new -= 1
            if body.is_kept:
                body.added.append(line[1:])
        elif sign != b"\\" or not line.startswith(b"\\ ") or last not in (b"-", b"+", b" "):
            raise reader.wrong("hunk is cut short")
        elif last == b"+":
            body.drop_newline()
        if old < 0 or new < 0:
            raise reader.wrong("hunk has more lines than it says")
        last = sign
        reader.take()


def _binary(reader: _Reader) -> None:
    """One or two blocks (forward and reverse); an empty line ends each."""
    blocks = 0
    while _BINARY_SIZE.fullmatch(reader.peek()):
        reader.take()
        while _BASE85.fullmatch(reader.peek()):
            reader.take()
        if reader.take() != b"\n":
            raise reader.wrong("binary block is not closed")
        blocks += 1
    if blocks not in (1, 2):
        raise reader.wrong("expected one or two binary blocks")


_ESCAPE = re.compile(rb'\\(?:([0-3][0-7]{2})|([abtnvfr"\\]))')
_LETTERS = dict(zip(b'abtnvfr"\\', b'\a\b\t\n\v\f\r"\\', strict=True))


def _closing_quote(reader: _Reader, title: bytes) -> int:
    match = re.match(rb'"(?:[^"\\]|\\.)*"', title)
    if match is None or title[match.end() : match.end() + 1] != b" ":
        raise reader.wrong("quoted name is not closed")
    return match.end() - 1


def _unquoted(reader: _Reader, name: bytes) -> bytes:
    """Undo git's C-style quoting. A name without quotes is returned unchanged."""
    if not name.startswith(b'"'):
        return name
    inner = name[1:-1]
    if not name.endswith(b'"') or len(name) < 2 or set(_ESCAPE.sub(b"", inner)) & set(b'"\\'):
        raise reader.wrong("bad quoting")

    def plain(match: re.Match[bytes]) -> bytes:
        return bytes([int(match[1], 8) if match[1] else _LETTERS[match[2][0]]])

    return _ESCAPE.sub(plain, inner)
