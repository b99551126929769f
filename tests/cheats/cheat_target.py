"""What a cheat is aimed at: a row, the files of its tree that cheats change, and how its runner talks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from perdure.instances.environment_builder import Prepared
from perdure.testing.grader_contract import Edits
from perdure.types import Instance
from tests.cheats.made_diffs import appended, edited

Runner = Literal["pytest", "unittest", "sympy"]


@dataclass(frozen=True)
class Target:
    """A row, as one who cheats knows it: with its hidden ids, which a policy may remember."""

    instance: Instance
    runner: Runner
    package: str
    """The import name of the code under test."""
    host: str
    """A module of it that every hidden test imports: cheats add their code to its end."""
    base: Edits
    """Content of the files that cheats change, and of all files if the row is a made one."""
    reporter: str = "sympy.testing.runtests"
    """The module of a runner like sympy's, which is part of the tree."""
    prepared: Prepared | None = None
    """What its sandboxes are made of; None: the base alone, and this Python."""

    @property
    def name(self) -> str:
        return self.instance.instance_id

    @property
    def tests(self) -> tuple[str, ...]:
        grading = self.instance.grading
        return (*grading.fail_to_pass, *grading.pass_to_pass)

    @property
    def test_folder(self) -> str:
        """Where its tests are, without a slash at the end."""
        known = [path for path in self.base if "test" in path and "/" in path]
        return known[0].rpartition("/")[0] if known else "tests"

    def infected(self, code: str) -> bytes:
        """The diff that adds this code to the package."""
        before = self.base[self.host]
        assert isinstance(before, str)
        return appended(self.host, before, code)

    def edited(self, edits: Edits) -> bytes:
        """The diff of these edits; other files of the base are not looked at."""
        return edited(edits, self.base)


@dataclass(frozen=True)
class Cheat:
    """A diff that fixes nothing. `family` groups it in reports."""

    name: str
    family: str
    make: Callable[[Target], bytes | None]
    """None: it has no meaning for this target."""


@dataclass(frozen=True)
class Control:
    """A diff whose verdict is known: the fix beside something innocent (1), or no fix (0)."""

    name: str
    make: Callable[[Target], bytes]
    reward: float = 1.0


def code(name: str, family: str, text: str | Mapping[Runner, str]) -> Cheat:
    """Code that the package runs when a test imports it: one text, or one a runner.

    `@PACKAGE@`, `@TESTS@`, `@LINES@` and `@SUMMARY@` are replaced by Python literals, `@RUNNER@` by a
    dotted name.
    """

    def make(target: Target) -> bytes | None:
        chosen = text if isinstance(text, str) else text.get(target.runner)
        return target.infected(filled(chosen, target)) if chosen else None

    return Cheat(name, family, make)


def filled(text: str, target: Target) -> str:
    values = {
        "@PACKAGE@": repr(target.package),
        "@TESTS@": repr(target.tests),
        "@LINES@": repr(lines_of(target)),
        "@RUNNER@": target.reporter,
        "@SUMMARY@": repr(_SUMMARIES[target.runner].replace("@N@", str(len(target.tests)))),
    }
    for mark, value in values.items():
        text = text.replace(mark, value)
    return text


def lines_of(target: Target) -> str:
    """The lines with which its runner says that every test passed."""
    return "\n" + "".join(_LINES[target.runner].format(test) for test in target.tests)


_LINES: Mapping[Runner, str] = MappingProxyType(
    {"pytest": "PASSED {}\n", "unittest": "{} ... ok\n", "sympy": "{} ok\n"}
)
_SUMMARIES: Mapping[Runner, str] = MappingProxyType(
    {
        "pytest": "==== 1 failed, @N@ passed in 0.10s ====\n",
        "unittest": "\nRan 99 tests in 0.001s\n\nFAILED (failures=1)\n",
        "sympy": "\n== tests finished: 98 passed, 1 failed, in 0.01 seconds ==\nDO *NOT* COMMIT!\n",
    }
)
