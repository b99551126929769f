"""Adds a canary test to a test patch in JavaScript, TypeScript, Go, Rust or Java.

It stands above the first test that the patch adds and is declared as that test is, so whatever runs
that test also runs the canary. Its name begins with that test's name, for commands that select tests
by name.
"""

import posixpath
import re
from collections.abc import Mapping
from secrets import randbelow, token_hex
from types import MappingProxyType
from typing import NamedTuple

from perdure.graders.diff.git_diff_parser import FileDiff, parse
from perdure.graders.twins.patch_lines import Hunk, hunks, without_index


class Inserted(NamedTuple):
    """The test patch with a canary in it. Every runner's test id contains `token`."""

    test_patch: bytes
    token: str
    path: str
    content: bytes


def insert_canary(test_patch: bytes) -> Inserted | None:
    """None if the patch adds no test in one of the languages. Raises: MalformedDiff."""
    token = token_hex(5)
    parts = []
    found: Inserted | None = None
    for file in parse(test_patch):
        kind = _BY_SUFFIX.get(posixpath.splitext(file.new_path)[1])
        made = _with_canary(file, kind, token) if kind and not found and not file.binary else None
        found = made or found
        parts.append(made.test_patch if made else without_index(file))
    return found._replace(test_patch=b"".join(parts)) if found else None


def _with_canary(file: FileDiff, kind: "_Kind", token: str) -> Inserted | None:
    head, found = hunks(file)
    moved = 0
    canary = b""
    parts = [head]
    for hunk in found:
        lines = list(hunk.lines)
        match = None if canary else _declaration(hunk, kind)
        if match is not None:
            place, declared = match
            canary = _rendered(kind, declared, token)
            added = [b"+" + line for line in canary.splitlines(keepends=True)]
            lines[place:place] = added
            parts.append(hunk.header(moved, len(added)))
            moved += len(added)
        else:
            parts.append(hunk.header(moved, 0))
        parts += lines
    path = file.new_path.decode("utf-8", "surrogateescape")
    return Inserted(b"".join(parts), token, path, canary) if canary else None


def _declaration(hunk: Hunk, kind: "_Kind") -> tuple[int, re.Match[bytes]] | None:
    """Where the hunk's first added test begins. The whole declaration must be added."""
    for place, line in enumerate(hunk.lines):
        if line.startswith(b"+"):
            added = b"".join(one[1:] for one in hunk.lines[place:] if one.startswith(b"+"))
            if match := kind.declaration.match(added):
                return place, match
    return None


def _rendered(kind: "_Kind", declared: re.Match[bytes], token: str) -> bytes:
    """Its check fails because a hash differs, so its text does not reveal that it must fail."""
    seed = token_hex(8)
    wrong = (_hash(seed) + 1 + randbelow(_MODULUS - 1)) % _MODULUS
    groups = {name: value or b"" for name, value in declared.groupdict().items()}
    text = kind.template.encode()
    for name, value in (*groups.items(), ("token", token.encode()), ("seed", seed.encode())):
        text = text.replace(b"{" + name.encode() + b"}", value)
    lines = text.replace(b"{wrong}", str(wrong).encode()).splitlines(keepends=True)
    return b"".join(groups["indent"] + line for line in lines)


_MODULUS = 65521


def _hash(seed: str) -> int:
    found = 7
    for character in seed:
        found = (found * 31 + ord(character)) % _MODULUS
    return found


class _Kind(NamedTuple):
    """How a language declares a test, and a test of this form that fails."""

    declaration: re.Pattern[bytes]
    template: str


_JAVASCRIPT = _Kind(
    re.compile(
        rb"(?P<indent>[ \t]*)(?P<call>it|test|specify)\((?P<quote>['\"`])(?P<name>[^'\"`$\n]*)"
    ),
    """{call}({quote}{name} {token}{quote}, () => {
  let h = 7;
  for (const c of '{seed}') h = (h * 31 + c.charCodeAt(0)) % 65521;
  if (h !== {wrong}) throw new Error(String(h));
});
""",
)
_GO = _Kind(
    re.compile(rb"(?P<indent>)func (?P<name>Test\w+)\((?P<t>\w+) \*testing\.T\) \{"),
    """func {name}{token}({t} *testing.T) {
	h := 7
	for _, c := range "{seed}" {
		h = (h*31 + int(c)) % 65521
	}
	if h != {wrong} {
		{t}.Fatal(h)
	}
}

""",
)
_RUST = _Kind(
    re.compile(rb"(?P<indent>[ \t]*)#\[test\]\s*(?:#\[[^\n]*\]\s*)*fn (?P<name>\w+)\("),
    """#[test]
fn {name}_{token}() {
    let mut h = 7u32;
    for c in "{seed}".bytes() {
        h = (h * 31 + c as u32) % 65521;
    }
    assert_eq!(h, {wrong});
}
""",
)
_JAVA = _Kind(
    re.compile(
        rb"(?P<indent>[ \t]*)@Test\b[^\n{]*\s*(?:@\w[^\n]*\s*)*(?:public )?void (?P<name>\w+)\("
    ),
    """@Test
public void {name}{token}() {
    int h = 7;
    for (char c : "{seed}".toCharArray()) {
        h = (h * 31 + c) % 65521;
    }
    if (h != {wrong}) {
        throw new AssertionError(h);
    }
}
""",
)
_BY_SUFFIX: Mapping[bytes, _Kind] = MappingProxyType(
    {
        **dict.fromkeys((b".js", b".cjs", b".mjs", b".jsx"), _JAVASCRIPT),
        **dict.fromkeys((b".ts", b".cts", b".mts", b".tsx"), _JAVASCRIPT),
        b".go": _GO,
        b".rs": _RUST,
        b".java": _JAVA,
    }
)
