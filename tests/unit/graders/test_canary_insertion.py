"""The canary of other languages: a test that fails, above the first test that a patch adds."""

import re
import subprocess
from pathlib import Path

import pytest

from perdure.graders.canary_insertion import Inserted, insert_canary
from perdure.testing.grader_contract import Edits, diff_of, make_repository

JAVASCRIPT = """const { add } = require('../calc');

describe('calc', () => {
  it("adds small numbers", () => {
    expect(add(1, 2)).toBe(3);
  });
});
"""
GO = """package calc

import "testing"

// TestAdd adds.
func TestAdd(t *testing.T) {
	if Add(1, 2) != 3 {
		t.Fatal("add")
	}
}
"""
RUST = """use calc::add;

#[test]
fn adds() {
    assert_eq!(add(1, 2), 3);
}
"""
JAVA = """import org.junit.Test;

public class CalcTest {
    @Test
    public void adds() {
        assertEquals(3, Calc.add(1, 2));
    }
}
"""
FILES = {
    "test/calc.test.js": (JAVASCRIPT, 'it("adds small numbers ', '  it("adds small numbers"'),
    "test/calc.test.ts": (JAVASCRIPT, 'it("adds small numbers ', '  it("adds small numbers"'),
    "calc_test.go": (GO, "func TestAdd", "func TestAdd("),
    "tests/calc.rs": (RUST, "fn adds_", "#[test]\nfn adds("),
    "CalcTest.java": (JAVA, "public void adds", "    @Test\n    public void adds("),
}
"""Path -> text, how the canary's declaration begins, and how the first test begins."""


def inserted(patch: bytes) -> Inserted:
    made = insert_canary(patch)
    assert made is not None
    return made


def applied(folder: Path, base: Edits, patch: bytes) -> Path:
    make_repository(folder, base)
    subprocess.run(["git", "apply"], cwd=folder, input=patch, check=True)
    return folder


def hunks(patch: bytes) -> list[bytes]:
    """Where each hunk begins and how long it is."""
    return re.findall(rb"^@@ [^@]+ @@", patch, re.MULTILINE)


@pytest.mark.parametrize("path", FILES)
def test_it_stands_above_the_first_added_test_and_is_named_after_it(
    path: str, tmp_path: Path
) -> None:
    text, begins, first = FILES[path]
    made = inserted(diff_of({path: text}, {"README": "x"}))

    written = (applied(tmp_path, {"README": "x"}, made.test_patch) / path).read_bytes()
    canary = next(line for line in written.splitlines() if made.token.encode() in line)
    assert canary.strip().startswith(begins.encode())
    above, _, below = written.partition(made.content)
    assert above + below == text.encode()
    assert below.startswith(first.encode())


@pytest.mark.parametrize("path", FILES)
def test_a_file_with_tests_above_and_below_keeps_its_other_lines(path: str, tmp_path: Path) -> None:
    """Line numbers of later hunks move with it."""
    text, _, _ = FILES[path]
    filler = "".join(f"// line {n}\n" for n in range(30))
    base: Edits = {path: f"// head\n{filler}// tail\n"}
    changed = f"// head\n{text}{filler}// tail, changed\n"
    made = inserted(diff_of({path: changed}, base))

    written = (applied(tmp_path, base, made.test_patch) / path).read_bytes()
    assert written.replace(made.content, b"") == changed.encode()
    assert hunks(made.test_patch) == hunks(diff_of({path: written.decode()}, base))


def test_two_canaries_share_neither_name_nor_check() -> None:
    patch = diff_of({"calc_test.go": GO}, {"README": "x"})
    first, second = inserted(patch), inserted(patch)

    assert first.token != second.token
    assert first.content.replace(first.token.encode(), b"") != second.content.replace(
        second.token.encode(), b""
    )


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("test_calc.py", "def test_adds():\n    assert add(1, 2) == 3\n"),
        ("calc.c", "int main(void) { return 0; }\n"),
        ("calc_test.go", "package calc\n\nvar x = 3\n"),
        ("calc.test.js", "expect(add(1, 2)).toBe(3);\n"),
    ],
)
def test_a_patch_without_a_test_of_these_languages_gets_none(path: str, text: str) -> None:
    assert insert_canary(diff_of({path: text}, {"README": "x"})) is None


@pytest.mark.parametrize(
    ("path", "declaration"),
    [
        ("src/lib.rs", "    #[test]\n    #[cfg(unix)]\n    fn adds() {\n    }\n"),
        ("ATest.java", "    @Test(timeout = 10)\n    void adds() {\n    }\n"),
        ("a.test.mjs", "  test(`adds`, () => {\n  });\n"),
    ],
)
def test_other_ways_to_declare_a_test(path: str, declaration: str) -> None:
    made = inserted(diff_of({path: declaration}, {"README": "x"}))

    indent = len(declaration) - len(declaration.lstrip())
    assert made.content.startswith(b" " * indent + declaration.strip()[:4].encode())
