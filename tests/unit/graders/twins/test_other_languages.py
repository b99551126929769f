"""Twins of tests in JavaScript, Go, Rust, Java and C: the rules, on source text."""

import pytest

from perdure.graders.twins.other_languages.languages import language_of
from perdure.graders.twins.other_languages.parsed_file import ParsedFile, TestFunction
from perdure.graders.twins.other_languages.twin_pools import (
    Change,
    changes,
    named_functions,
    pools_of,
)

BODIES = {
    "a.test.js": "it('adds', async () => {{\n{}\n}});\n",
    "a.test.ts": "test('adds', () => {{\n{}\n}});\n",
    "a_test.go": "package a\nfunc TestAdds(t *testing.T) {{\n{}\n}}\n",
    "a.rs": "#[test]\nfn adds() {{\n{}\n}}\n",
    "A.java": "class A {{ @Test public void adds() {{\n{}\n}} }}\n",
    "jupiter/A.java": (
        "import org.junit.jupiter.api.Test;\nclass A {{ @Test public void adds() {{\n{}\n}} }}\n"
    ),
    "a.c": "int main(void) {{\n{}\nreturn 0; }}\n",
}


def parsed(path: str, text: str, added: frozenset[int] | None = None) -> ParsedFile:
    language = language_of(path)
    assert language is not None
    lines = added if added is not None else frozenset(range(1, text.count("\n") + 2))
    return ParsedFile(path, text.encode(), lines, language)


def made(path: str, body: str) -> list[Change]:
    file = parsed(path, BODIES[path].format(body))
    return [change for function in file.functions for change in changes(file, function)]


@pytest.mark.parametrize(
    ("path", "line", "twin"),
    [
        ("a.test.js", "expect(add(1, 2)).toBe(3);", "expect(add(1, 2)).toBe(4);"),
        ("a.test.js", "expect(add(1, 2)).toBe(3);", "expect(add(1, 2)).not.toBe(3);"),
        ("a.test.js", "expect(a).to.equal(3);", "expect(a).to.equal(4);"),
        ("a.test.js", "await expect(p()).resolves.toEqual({ a: 3 });", "await expect(p()).resolves.toEqual({ a: 4 });"),
        ("a.test.js", "assert.strictEqual(add(1, 2), 3);", "assert.strictEqual(add(1, 2), 2);"),
        ("a.test.js", "assert.strictEqual(add(1, 2), 3);", "assert.notStrictEqual(add(1, 2), 3);"),
        ("a.test.js", "assert.deepStrictEqual(f(), [1, true]);", "assert.deepStrictEqual(f(), [1, false]);"),
        ("a.test.js", "assert(a() === 3 && b());", "assert(a() === 4 && b());"),
        ("a.test.js", "assert.ok(even(4));", "assert.ok(!even(4));"),
        ("a.test.js", "if (a() !== 3) throw new Error();", "if (a() !== 4) throw new Error();"),
        ("a.test.js", "const want = [3]; expect(f()).toEqual(want);", "const want = [4]; expect(f()).toEqual(want);"),
        ("a.test.ts", "expect(f<number>(1)).toBe(3);", "expect(f<number>(1)).toBe(4);"),
        ("a_test.go", "if got := F(1); got != 3 { t.Errorf(`x`) }", "if got := F(1); got != 4 { t.Errorf(`x`) }"),
        ("a_test.go", "if got != 3 { t.Fatal() }", "if got == 3 { t.Fatal() }"),
        ("a_test.go", "if err != nil || got != -3 { t.Fatal() }", "if err != nil || got != -4 { t.Fatal() }"),
        ("a_test.go", "if got, want := F(1), 3; got != want { t.Errorf(`%d`, want) }", "if got, want := F(1), 4; got != want { t.Errorf(`%d`, want) }"),
        ("a_test.go", "assert.True(t, F() == 3)", "assert.True(t, F() == 4)"),
        ("a_test.go", "assert.Equal(t, 3, F())", "assert.Equal(t, 4, F())"),
        ("a_test.go", "require.True(t, F())", "require.False(t, F())"),
        ("a_test.go", "want := []int{3}; if !reflect.DeepEqual(F(), want) { t.Fatal(want) }", "want := []int{4}; if !reflect.DeepEqual(F(), want) { t.Fatal(want) }"),
        ("a_test.go", 't.Run("b", func(t *testing.T) { if F() != 3 { t.Fatal() } })', 't.Run("b", func(t *testing.T) { if F() != 4 { t.Fatal() } })'),
        ("a.rs", "assert_eq!(f(1), vec![Some(3), None]);", "assert_eq!(f(1), vec![Some(4), None]);"),
        ("a.rs", "assert_eq!(f(1), 3u8);", "assert_ne!(f(1), 3u8);"),
        ("a.rs", "assert!(f(1) == 3, \"m\");", "assert!(f(1) == 4, \"m\");"),
        ("a.rs", "assert!(even(4));", "assert!(!(even(4)));"),
        ("a.rs", "let want = 3; assert_eq!(f(), want);", "let want = 4; assert_eq!(f(), want);"),
        ("A.java", "assertEquals(3, f());", "assertEquals(4, f());"),
        ("A.java", 'assertEquals("message", 3, f());', 'assertEquals("message", 4, f());'),
        ("A.java", 'assertEquals("value " + n, 3, f());', 'assertEquals("value " + n, 4, f());'),
        ("A.java", 'assertEquals(3, f(), "message");', 'assertEquals(4, f(), "message");'),
        ("jupiter/A.java", 'assertEquals("a 1", f(), "message");', 'assertEquals("a 2", f(), "message");'),
        ("jupiter/A.java", 'assertEquals("a 1", f(), () -> "message");', 'assertEquals("a 2", f(), () -> "message");'),
        ("jupiter/A.java", 'assertEquals("a 1", f(), message(n));', 'assertEquals("a 2", f(), message(n));'),
        ("jupiter/A.java", 'assertEquals(0.5, f(), "message");', 'assertEquals(1.5, f(), "message");'),
        ("A.java", "assertArrayEquals(new int[]{3}, f());", "assertArrayEquals(new int[]{4}, f());"),
        ("A.java", 'assertTrue("a 1".equals(f()));', 'assertTrue("a 2".equals(f()));'),
        ("A.java", 'assertTrue("m", f() == 3);', 'assertTrue("m", f() == 4);'),
        ("A.java", 'assertTrue(slug, slug.equals("a 1"));', 'assertTrue(slug, slug.equals("a 2"));'),
        ("A.java", "Assert.assertTrue(f());", "Assert.assertFalse(f());"),
        ("A.java", "assertThat(f()).isEqualTo(List.of(3));", "assertThat(f()).isEqualTo(List.of(4));"),
        ("A.java", 'if (!"a 1".equals(f())) throw new Error();', 'if (!"a 2".equals(f())) throw new Error();'),
        ("a.c", "assert(f(1) == 3);", "assert(f(1) == 4);"),
        ("a.c", "if (f(1) != 3) return 1;", "if (f(1) != 4) return 1;"),
        ("a.c", 'assert(strcmp(f(), "a 1") == 0);', 'assert(strcmp(f(), "a 2") == 0);'),
        ("a.c", "CHECK_EQ(3, f(1));", "CHECK_EQ(4, f(1));"),
    ],
)  # fmt: skip
def test_an_expectation_that_always_runs_has_a_twin(path: str, line: str, twin: str) -> None:
    assert twin.encode() in [change.after for change in made(path, line)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("a.test.js", "for (const x of f()) { expect(x).toBe(3); }"),
        ("a.test.js", "if (f()) { expect(g()).toBe(3); }"),
        ("a.test.js", "f(() => { expect(g()).toBe(3); });"),
        ("a.test.js", "f().then((x) => expect(x).toBe(3));"),
        ("a.test.js", "try { expect(g()).toBe(3); } catch (e) {}"),
        ("a.test.js", "if (skipped()) return;\nexpect(g()).toBe(3);"),
        ("a.test.js", "ready && expect(g()).toBe(3);"),
        ("a.test.js", "const n = 3; use(n); g(n);"),
        ("a.test.js", "cache.equal(3, g());"),
        ("a_test.go", "for i := 0; i < n; i++ { if F(i) != 3 { t.Fatal() } }"),
        ("a_test.go", "defer func() { if F() != 3 { t.Fatal() } }()"),
        ("a_test.go", "if F() != 3 { t.Log(`odd`) }"),
        ("a.rs", "for x in f() { assert_eq!(x, 3); }"),
        ("a.rs", "f(|x| assert_eq!(x, 3));"),
        ("A.java", "f(x -> assertEquals(3, x));"),
        ("A.java", "for (int x : f()) { assertEquals(3, x); }"),
        ("a.c", "while (f()) { assert(g() == 3); }"),
        ("a.c", "if (!supported()) return 0;\nassert(g() == 3);"),
    ],
)
def test_a_line_that_a_correct_fix_may_not_reach_has_none(path: str, body: str) -> None:
    assert made(path, body) == []


@pytest.mark.parametrize(
    ("path", "body", "line"),
    [
        ("a.test.js", "const n = 3; expect(f(n)).toBe(n);", "const n = 4"),
        ("a_test.go", "n := 3; if F(n) != n { t.Fatal() }", "n := 4"),
        ("a.rs", "let n = 3; assert_eq!(f(n), n);", "let n = 4"),
        ("a.test.js", "let n = 3; n += 1; expect(f()).toBe(n);", "let n = 4"),
        ("A.java", "assertEquals(0.5, f(), 0.1);", "assertEquals(1.5"),
        ("A.java", "assertEquals(-0.5, f(), EPSILON);", "assertEquals(-1.5"),
        ("A.java", "assertEquals(3, f(), 1);", "assertEquals(4"),
        ("A.java", 'assertEquals("message", 0.5, f(), 0.1);', "1.5, f()"),
        ("jupiter/A.java", 'assertEquals(0.5, f(), 0.1, "message");', "assertEquals(1.5"),
        ("jupiter/A.java", 'assertEquals("a 1", f(), "message 1");', '"message 2"'),
        ("a.test.js", "expect(f()).not.toBe(3);", "toBe(4)"),
        ("a_test.go", "if F() == 3 { t.Fatal() }", "== 4"),
        ("a.test.js", "if (f() === 3) throw new Error();", "=== 4"),
    ],
)
def test_a_change_that_one_fix_could_pass_both_ways_is_not_made(
    path: str, body: str, line: str
) -> None:
    """An input of the code under test, a tolerance, or a value that must differ."""
    assert not [change for change in made(path, body) if line.encode() in change.after]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.rs", "#[test]\n#[should_panic]\nfn adds() {\n assert_eq!(f(), 3);\n}\n"),
        ("A.java", "class A { @Test(expected = E.class) public void adds() {\n assertEquals(3, f());\n} }"),
        ("a.rs", "fn helper() {\n assert_eq!(f(), 3);\n}\n"),
        ("a_test.go", "package a\nfunc helper(t *testing.T) {\n if F() != 3 { t.Fatal() }\n}\n"),
    ],
)  # fmt: skip
def test_only_tests_that_must_end_without_an_exception_count(path: str, text: str) -> None:
    assert parsed(path, text).functions == ()


def test_a_table_of_go_gives_twins_of_its_expected_column() -> None:
    body = """tests := []struct {
		in   string
		want int
	}{
		{"a", 1},
		{in: "b", want: 2},
	}
	for _, tt := range tests {
		t.Run(tt.in, func(t *testing.T) {
			if got := F(tt.in); got != tt.want { t.Fatalf("%d %d", got, tt.want) }
		})
	}"""
    after = [change.after.strip() for change in made("a_test.go", body)]

    assert b'{"a", 2},' in after
    assert b'{in: "b", want: 3},' in after
    assert not [line for line in after if line.startswith((b'{"b"', b'{in: "a"'))]


LOOP = """	for {}, tt := range tests {{
		t.Run({}, func(t *testing.T) {{
			if got := F(tt.in); got != tt.want {{ t.Fatal(got) }}
		}})
	}}
	if G() != 7 {{ t.Fatal() }}"""
SLICE = """tests := []struct {
		name string
		in, want int
	}{
		{"two", /* in */ 1, 10}, // a comment
		{name: "two words", in: 2, want: 20},
		{fmt.Sprint(3), 3, 30},
	}
"""
MAP = """tests := map[string]struct{ in, want int }{
		"two":       {1, 10},
		"two words": {in: 2, want: 20},
		key(3):      {3, 30},
	}
"""


@pytest.mark.parametrize(
    ("table", "loop"),
    [(SLICE, ("_", "tt.name")), (MAP, ("name", "name"))],
    ids=["by a field", "by a key"],
)
def test_each_named_case_of_a_table_has_twins_of_its_own(table: str, loop: tuple[str, str]) -> None:
    """One twin would leave the other subtests without any."""
    file = parsed("a_test.go", BODIES["a_test.go"].format(table + LOOP.format(*loop)))
    ids = ("TestAdds", "TestAdds/two", "TestAdds/two_words", "TestAdds/two_words/in", "TestAdds/3")
    parent, one, two, inner, unnamed = ids
    found = pools_of(file, file.functions[0], ids)
    after = {pool.tests: b"\n".join(twin.after for twin in pool.twins) for pool in found}

    assert list(after) == [(one,), (two, inner), (unnamed,)]
    assert {pool.parents for pool in found} == {(parent,)}
    assert b"11}" in after[one,]
    assert b"want: 21}" in after[two, inner]
    assert all(word in after[unnamed,] for word in (b"3, 31}", b"G() != 8"))
    assert not any(word in text for text in after.values() for word in (b"in: 3", b"{2,", b"{4,"))
    assert {pool.tests for pool in pools_of(file, file.functions[0], ids[:1])} == {(parent,)}


def test_only_lines_that_the_test_patch_adds_change() -> None:
    file = parsed(
        "a.c", "int main(void) {\n assert(f(1) == 3);\n assert(f(2) == 5);\n}\n", frozenset((3,))
    )

    assert {change.line for change in changes(file, file.functions[0])} == {3}


NESTED = """describe('calc', () => {
  describe('add', () => { it('works', () => {}); it('works twice', () => {}); });
  describe('mul', () => { it('works', () => {}); });
});
"""


@pytest.mark.parametrize(
    ("test", "owners"),
    [
        ("- calc add works", ("calc", "add")),
        ("- calc mul works", ("calc", "mul")),
        ("calc > add > works twice", ("calc", "add")),
    ],
)
def test_an_id_names_the_test_with_its_title_and_blocks(test: str, owners: tuple[str, ...]) -> None:
    found, without = named_functions([parsed("a.test.js", NESTED)], [test])

    assert without == {}
    assert [function.owners for _, function in found] == [owners]


@pytest.mark.parametrize(("test", "why"), [("works", "several tests"), ("divides", "no test of")])
def test_an_id_that_names_no_test_or_several_says_so(test: str, why: str) -> None:
    found, without = named_functions([parsed("a.test.js", NESTED)], [test])

    assert found == {}
    assert why in without[test]


def test_subtests_share_the_function_of_their_test() -> None:
    file = parsed("a_test.go", BODIES["a_test.go"].format(""))
    found, _ = named_functions([file], ["TestAdds", "TestAdds/small"])

    named: list[tuple[TestFunction, list[str]]] = [(place[1], ids) for place, ids in found.items()]
    assert [(function.name, ids) for function, ids in named] == [
        ("TestAdds", ["TestAdds", "TestAdds/small"])
    ]


def test_a_deep_file_is_read() -> None:
    """Generated tests hold expressions that nest deeper than Python's recursion limit."""
    long = " + ".join(["1"] * 5000)
    body = f"const total = {long};\nexpect(f(total)).toBe(3);"

    assert b"expect(f(total)).toBe(4);" in [change.after for change in made("a.test.js", body)]
