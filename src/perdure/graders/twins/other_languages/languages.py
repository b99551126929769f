"""What Perdure knows of each language: its grammar, how it writes literals, and what compares."""

import importlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from perdure.errors import MissingDependency
from perdure.installation import command_for_packages

if TYPE_CHECKING:
    from tree_sitter import Parser


@dataclass(frozen=True)
class Language:
    """One language. Names of nodes are those of its tree-sitter grammar."""

    name: str
    package: str
    """The package of its grammar, as Python imports it."""
    numbers: frozenset[str]
    texts: frozenset[str]
    makers: frozenset[bytes]
    """Names that make a constant of constants, such as `vec` or `List.of`."""
    equal: frozenset[bytes]
    """Calls with two arguments that must be equal, or `expect` matchers with one."""
    opposites: Mapping[bytes, bytes]
    """The name of a call that asserts -> the name of one that asserts the contrary."""
    fails: re.Pattern[bytes]
    """A statement that makes the test fail contains this: in `if x != 4 { t.Error() }`, `.Error`."""
    grammar: str = "language"
    """The function of `package` that returns the grammar."""

    def parser(self) -> "Parser":
        """Raises: MissingDependency."""
        return _parser(self.package, self.grammar)


@cache
def _parser(package: str, grammar: str) -> "Parser":
    try:
        from tree_sitter import Language as Grammar
        from tree_sitter import Parser

        module = importlib.import_module(package)
    except ImportError:
        name = package.replace("_", "-")
        raise MissingDependency(
            f"twins of these tests need the package {name}: "
            f"{command_for_packages('tree-sitter', name)}"
        ) from None
    return Parser(Grammar(getattr(module, grammar)()))


def language_of(path: str) -> Language | None:
    return _BY_SUFFIX.get(posixpath.splitext(path)[1])


def _names(words: str) -> frozenset[bytes]:
    return frozenset(words.encode().split())


def _pairs(words: str) -> Mapping[bytes, bytes]:
    """`a/b c/d`: each is the opposite of the other."""
    pairs = dict(pair.encode().split(b"/", 1) for pair in words.split())
    return MappingProxyType({**pairs, **{new: old for old, new in pairs.items()}})


_JAVASCRIPT = Language(
    name="JavaScript",
    package="tree_sitter_javascript",
    numbers=frozenset(("number",)),
    texts=frozenset(("string", "template_string")),
    makers=_names("Set Map Date BigInt Number String"),
    equal=_names(
        "toBe toEqual toStrictEqual toHaveLength equal equals eql eq "
        "strictEqual deepEqual deepStrictEqual is same"
    ),
    opposites=_pairs(
        "equal/notEqual strictEqual/notStrictEqual deepEqual/notDeepEqual "
        "deepStrictEqual/notDeepStrictEqual toBeTruthy/toBeFalsy toBeDefined/toBeUndefined"
    ),
    fails=re.compile(rb"\b(?:throw\b|fail\()"),
)
_TYPESCRIPT = replace(
    _JAVASCRIPT,
    name="TypeScript",
    package="tree_sitter_typescript",
    grammar="language_typescript",
)
_GO = Language(
    name="Go",
    package="tree_sitter_go",
    numbers=frozenset(("int_literal", "float_literal")),
    texts=frozenset(("interpreted_string_literal", "raw_string_literal", "rune_literal")),
    makers=_names(
        "int int8 int16 int32 int64 uint uint8 uint16 uint32 uint64 float32 float64 "
        "string byte rune"
    ),
    equal=_names("Equal EqualValues Exactly DeepEqual ElementsMatch Len"),
    opposites=_pairs(
        "Equal/NotEqual True/False Nil/NotNil NoError/Error Contains/NotContains Empty/NotEmpty"
    ),
    fails=re.compile(rb"\.(?:Error|Fatal|Fail)|\bpanic\("),
)
_RUST = Language(
    name="Rust",
    package="tree_sitter_rust",
    numbers=frozenset(("integer_literal", "float_literal")),
    texts=frozenset(("string_literal", "char_literal", "raw_string_literal")),
    makers=_names("Some None Ok Err vec Vec String from to_string to_owned into Box new"),
    equal=_names("assert_eq debug_assert_eq"),
    opposites=_pairs("assert_eq/assert_ne"),
    fails=re.compile(rb"\b(?:panic|unreachable)!|\bassert!\(false"),
)
_JAVA = Language(
    name="Java",
    package="tree_sitter_java",
    numbers=frozenset(
        ("decimal_integer_literal", "hex_integer_literal", "decimal_floating_point_literal")
    ),
    texts=frozenset(("string_literal", "character_literal")),
    makers=_names(
        "List Set Map Arrays of asList Optional Integer Long valueOf entry BigInteger "
        "BigDecimal Collections singletonList"
    ),
    equal=_names(
        "assertEquals assertArrayEquals assertIterableEquals assertSame "
        "isEqualTo hasSize containsExactly"
    ),
    opposites=_pairs(
        "assertEquals/assertNotEquals assertTrue/assertFalse assertNull/assertNotNull "
        "assertSame/assertNotSame isEqualTo/isNotEqualTo isTrue/isFalse isNull/isNotNull"
    ),
    fails=re.compile(rb"\b(?:throw\b|fail\()"),
)
_C = Language(
    name="C",
    package="tree_sitter_c",
    numbers=frozenset(("number_literal",)),
    texts=frozenset(("string_literal", "char_literal")),
    makers=frozenset(),
    equal=_names(
        "assert_int_equal assert_string_equal ck_assert_int_eq ck_assert_str_eq "
        "TEST_ASSERT_EQUAL TEST_ASSERT_EQUAL_INT TEST_ASSERT_EQUAL_STRING "
        "ASSERT_EQ ASSERT_STREQ CHECK_EQ CHECK_STREQ EXPECT_EQ REQUIRE_EQ"
    ),
    opposites=MappingProxyType({}),
    fails=re.compile(rb"\breturn (?!0\b)|\b_?exit\((?!0\b)|\babort\(|(?i:fail)"),
)

_BY_SUFFIX: Mapping[str, Language] = MappingProxyType(
    {
        **dict.fromkeys((".js", ".cjs", ".mjs", ".jsx"), _JAVASCRIPT),
        **dict.fromkeys((".ts", ".cts", ".mts"), _TYPESCRIPT),
        ".tsx": replace(_TYPESCRIPT, grammar="language_tsx"),
        ".go": _GO,
        ".rs": _RUST,
        ".java": _JAVA,
        ".c": _C,
    }
)
SUFFIXES = tuple(_BY_SUFFIX)
