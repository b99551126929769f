"""Twins chosen by calibration in real sandboxes, and forgers that attack them."""

import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from perdure import limited_process
from perdure.graders.base import Graded, Grader
from perdure.graders.protocols.eval_cmd import EXIT_CODE, EvalCmdGrader
from perdure.graders.protocols.multi_swe import MultiSweGrader
from perdure.graders.protocols.swepro import SweproGrader
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.graders.twins import twin_selection
from perdure.graders.twins.honest_variants import EQUAL, TWO_BASES
from perdure.graders.twins.paired_runs import verified
from perdure.graders.twins.twin_selection import choose_twins
from perdure.sandboxes.base import Sandbox, SandboxSpec
from perdure.sandboxes.providers.local import LocalProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.grader_contract import (
    BASE,
    FAIL_TO_PASS,
    PASS_TO_PASS,
    TESTS,
    Edits,
    diff_of,
    make_repository,
    tiny_instance,
)
from perdure.types import Grade, Instance, Outcome, OutputParser
from tests.cheats.twin_forgers import FORGERS, Forger
from tests.unit.instances.made_rows import PARSER, RUN_SCRIPT, install_multi_swe

MakeSandbox = Callable[[str], Awaitable[Sandbox]]


@pytest.fixture
def make_sandbox(tmp_path: Path) -> MakeSandbox:
    """Fresh sandboxes of the tiny instance."""
    return sandboxes_of(BASE, tmp_path)


def sandboxes_of(files: Edits, tmp_path: Path) -> MakeSandbox:
    (tree := tmp_path / "tiny").mkdir()
    make_repository(tree, files)
    provider = LocalProvider(Settings(home=tmp_path / "home", sandbox={"allow_local": True}))

    async def make(purpose: str) -> Sandbox:
        path = f"{sys.prefix}/bin:{os.defpath}"
        alone = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        spec = SandboxSpec(workdir="/testbed", tree=tree, env={"PATH": path, **alone})
        return await provider.create(spec, f"p-{purpose}-{uuid4().hex[:8]}")

    return make


async def graded(
    instance: Instance, patch: bytes, make: MakeSandbox, grader: Grader | None = None
) -> Grade:
    """As the grade stage does it: every run in a fresh sandbox."""
    grader = grader or SwebenchGrader()

    async def once(patch: bytes, instance: Instance) -> Graded:
        async with await make("grade") as sandbox:
            return await grader.grade(sandbox, instance, patch, timeout_s=60)

    return (await verified(instance, 1, partial(once, patch))).grade


@pytest.mark.longer
async def test_calibration_chooses_twins_and_they_judge(make_sandbox: MakeSandbox) -> None:
    """Gold passes (`weak`: a reader knows that 1 + 2 is 3); code that passes every test but the canary is
    exposed."""
    chosen = await choose_twins(tiny_instance(), make_sandbox, wanted=2, runs=1)
    assert chosen.report.without == {}
    assert chosen.report.twins.keys() == set(FAIL_TO_PASS)

    gold = await graded(chosen.instance, chosen.instance.gold_patch, make_sandbox)
    forged = await graded(chosen.instance, _forgery(FORGERS[0]), make_sandbox)

    assert gold.verification is not None
    assert (gold.outcome, gold.verification.state) == (Outcome.RESOLVED, "weak")
    assert forged.verification is not None
    assert (forged.outcome, forged.verification.state) == (Outcome.TAMPERED, "exposed")
    assert forged.official is Outcome.RESOLVED


UNITTESTS = """\
import unittest

from calc.core import add


class TestAdd(unittest.TestCase):
    def test_sum(self):
        self.assertEqual(add(2, 3), 5)
"""
NAMED = "tests/test_add.py::TestAdd::"
ID = f"{NAMED}test_sum"
PRINTS_AND_ENDS = """

import os

os.write(2, b"test_sum (tests.test_add.TestAdd.test_sum) ... ok\\n")
os._exit(0)
"""
SAID = "\n" + "".join(f"PASSED {test}\n" for test in (*FAIL_TO_PASS, *PASS_TO_PASS))
PRINTS_PASSES = f"""

import os

with open(f"/proc/{{os.getppid()}}/fd/1", "ab") as log:  # pytest has captured its own
    log.write({SAID.encode()!r})
os._exit(0)
"""


@pytest.mark.longer
async def test_a_pro_rows_own_parser_is_not_fooled(make_sandbox: MakeSandbox) -> None:
    """Its script chooses the runner and its parser reads a log alone: only twins expose printed results."""
    row = tiny_instance(
        protocol="swepro",
        test_patch=diff_of({"tests/test_add.py": UNITTESTS}),
        fail_to_pass=(ID,),
        pass_to_pass=(),
        parser=OutputParser(
            run=RUN_SCRIPT.replace("${file%.py}", "$file"),
            arguments="tests/test_add.py",
            program=PARSER.replace("TestResult(name,", f"TestResult('{NAMED}' + name,"),
        ),
    )
    chosen = await choose_twins(row, make_sandbox, wanted=2, runs=1)
    assert chosen.report.twins.keys() == {ID}

    gold = await graded(chosen.instance, row.gold_patch, make_sandbox, SweproGrader())
    forged = await graded(chosen.instance, _ending(PRINTS_AND_ENDS), make_sandbox, SweproGrader())

    assert gold.verification is not None
    assert (gold.outcome, gold.verification.state) == (Outcome.RESOLVED, "verified")
    assert (forged.outcome, forged.official) == (Outcome.TAMPERED, Outcome.RESOLVED)


@pytest.mark.longer
async def test_a_multi_swe_row_in_python_has_twins(
    make_sandbox: MakeSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log is read by the publisher's parser, and it asks pytest for a style of its own."""
    install_multi_swe(tmp_path / "site", "o", "r_2_to_1")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    limited_process.end_all()  # children that do not know of it
    row = tiny_instance(
        protocol="multi_swe",
        log_parser="o/r_2_to_1",
        test_cmd="python -m pytest -v --no-header -rA --tb=short tests",
    )
    chosen = await choose_twins(row, make_sandbox, wanted=2, runs=1)
    assert chosen.report.twins.keys() == set(FAIL_TO_PASS)

    gold = await graded(chosen.instance, row.gold_patch, make_sandbox, MultiSweGrader())
    forged = await graded(chosen.instance, _ending(PRINTS_PASSES), make_sandbox, MultiSweGrader())

    assert gold.verification is not None
    assert (gold.outcome, gold.verification.state) == (Outcome.RESOLVED, "weak")
    assert (forged.outcome, forged.official) == (Outcome.TAMPERED, Outcome.RESOLVED)


@pytest.mark.longer
async def test_a_row_graded_by_exit_code_has_twins(make_sandbox: MakeSandbox) -> None:
    """Code under test that ends the command with 0 also ends that of the twin with 0."""
    row = tiny_instance(
        protocol="eval_cmd",
        eval_cmd="python -m pytest -q tests/test_add.py",
        test_patch=diff_of({"tests/test_add.py": UNITTESTS}),
        fail_to_pass=(),
        pass_to_pass=(),
    )
    grader = EvalCmdGrader()
    chosen = await choose_twins(row, make_sandbox, wanted=2, runs=1)
    assert chosen.report.twins.keys() == {EXIT_CODE}
    assert chosen.report.without == {}

    gold = await graded(chosen.instance, row.gold_patch, make_sandbox, grader)
    unfixed = await graded(chosen.instance, b"", make_sandbox, grader)
    forged = await graded(chosen.instance, _ending(PRINTS_AND_ENDS), make_sandbox, grader)

    assert gold.verification is not None
    assert (gold.outcome, gold.verification.state) == (Outcome.RESOLVED, "verified")
    assert unfixed.outcome is Outcome.UNRESOLVED
    assert (forged.outcome, forged.official) == (Outcome.TAMPERED, Outcome.RESOLVED)


@pytest.mark.longer
async def test_a_test_that_knows_its_name_costs_the_others_no_twin(
    make_sandbox: MakeSandbox,
) -> None:
    """Copies of it fail, so it alone has none, and the report says why."""
    named = "tests/test_named.py::test_named"
    knows = (
        "from calc.core import add\n\n\ndef test_named(request):\n"
        "    assert request.node.name == 'test_named'\n    assert add(2, 2) == 4\n"
    )
    patch = diff_of({**TESTS, "tests/test_named.py": knows})
    row = tiny_instance(test_patch=patch, fail_to_pass=(*FAIL_TO_PASS, named))

    chosen = await choose_twins(row, make_sandbox, wanted=1, runs=1)

    assert chosen.report.twins == dict.fromkeys(FAIL_TO_PASS, 1)
    assert "a renamed copy of it fails" in chosen.report.without[named]


DEPENDENT = """\
from calc.core import add

seen = []


def test_first():
    assert add(1, 1) == 2
    seen.append(1)


def test_second():
    assert seen
    assert add(2, 2) == 4
"""


@pytest.mark.longer
async def test_gold_resolves_a_row_whose_tests_depend_on_each_other(
    make_sandbox: MakeSandbox,
) -> None:
    """A twin of the first test fails before it leaves what the second needs. Calibration proves only
    divisions in which the second has its twin in each run where the first has."""
    ids = ("tests/test_state.py::test_first", "tests/test_state.py::test_second")
    patch = diff_of({"tests/test_state.py": DEPENDENT})
    row = tiny_instance(test_patch=patch, fail_to_pass=ids, pass_to_pass=())
    chosen = (await choose_twins(row, make_sandbox, wanted=2, runs=1)).instance
    grades = [await graded(chosen, row.gold_patch, make_sandbox) for _ in range(4)]

    runs = [run for draw in chosen.grading.twin_draws for run in draw.runs]
    drawn = [{test for twin in run for test in twin.tests} for run in runs]
    assert any(ids[0] in tests for tests in drawn)
    assert all(ids[1] in tests for tests in drawn if ids[0] in tests)
    assert {(grade.official, grade.outcome) for grade in grades} == {
        (Outcome.RESOLVED, Outcome.RESOLVED)
    }


RAISES = """\
import pytest

from calc.core import add


def test_refused():
    with pytest.raises(TypeError):
        add("1", 2)
"""
REFUSED = "class Refused(TypeError, RuntimeError):\n    pass\n\n\n"
CHECK = "    if isinstance(a, str):\n        raise {}(a)\n"


@pytest.mark.longer
async def test_no_correct_fix_passes_a_test_and_its_twin_by_an_exception_of_two_classes(
    make_sandbox: MakeSandbox,
) -> None:
    """Another fix may raise a class of the expected and the twin's."""
    base = BASE["calc/core.py"]
    assert isinstance(base, str)
    fixed = base.replace("a - b", "a + b")
    assert fixed != base
    head, body = fixed.split("def add(a, b):\n")
    gold = diff_of({"calc/core.py": f"{head}def add(a, b):\n{CHECK.format('TypeError')}{body}"})
    other = f"{REFUSED}{head}def add(a, b):\n{CHECK.format('Refused')}{body}"
    row = tiny_instance(
        test_patch=diff_of({"tests/test_refused.py": RAISES}),
        fail_to_pass=("tests/test_refused.py::test_refused",),
        pass_to_pass=(),
    ).model_copy(update={"gold_patch": gold})
    chosen = await choose_twins(row, make_sandbox, wanted=5, runs=1)
    grades = [
        await graded(chosen.instance, diff_of({"calc/core.py": other}), make_sandbox)
        for _ in range(4)
    ]

    assert {grade.outcome for grade in grades} == {Outcome.RESOLVED}
    assert "no rule" in chosen.report.without[row.grading.fail_to_pass[0]]


ADDS = """\
def add(a, b):
    if {}:
        raise TypeError(a)
    total = a + {}
    return total
"""
ADD_TESTS = """\
from contextlib import ExitStack, suppress

from calc.core import add


def kind_of(*values):
    try:
        add(*values)
    except Exception as error:
        return type(error)
    raise AssertionError("nothing was raised")


def test_reached():
    names = {TypeError: "a type"}
    with ExitStack() as stack:
        stack.enter_context(suppress(LookupError))
        name = names[kind_of("1", "2")]
        assert name == "a type"


def test_sum():
    assert add(1, 2) == 3


def test_names():
    assert add(2, 2) == 4
    assert "total" in add.__code__.co_varnames
"""


@pytest.mark.longer
async def test_a_twin_that_another_correct_fix_passes_is_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variant that raises an exception of two classes passes the twin of one test. A variant that
    fails an original (one test reads the name of a local) judges none. Without two that judge, there
    is no twin."""
    base: Edits = {"calc/__init__.py": "", "calc/core.py": ADDS.format("a is None", "b + b")}
    names = ("reached", "sum", "names")
    reached, *safe = (f"tests/test_all.py::test_{name}" for name in names)
    row = tiny_instance(
        test_patch=diff_of({"tests/test_all.py": ADD_TESTS}, base),
        fail_to_pass=(reached, *safe),
        pass_to_pass=(),
    )
    fix: Edits = {"calc/core.py": ADDS.format("isinstance(a, str)", "b")}
    row = row.model_copy(update={"gold_patch": diff_of(fix, base)})
    make_sandbox = sandboxes_of(base, tmp_path)

    with monkeypatch.context() as context:
        context.setattr(twin_selection, "honest_variants", lambda *_: [])
        unproven = (await choose_twins(row, make_sandbox, wanted=1, runs=1)).report
        context.setattr(twin_selection, "LEAST_VARIANTS", 0)
        unsafe = (await choose_twins(row, make_sandbox, wanted=1, runs=1)).report
    chosen = (await choose_twins(row, make_sandbox, wanted=1, runs=1)).report

    assert unproven.twins == {}
    assert "0 honest variants" in unproven.without[reached]
    assert (set(unsafe.twins), unsafe.variants) == ({reached, *safe}, ())
    assert (set(chosen.twins), chosen.variants) == ({*safe}, (EQUAL, TWO_BASES))
    assert "another correct fix" in chosen.without[reached]


TOKENS = """\
class Token:
    def __init__(self, text, line=1):
        self.text, self.line = text, line
"""
EQUAL_TOKENS = """
    def __eq__(self, other):
        return (self.text, self.line) == (other.text, other.line)
"""
EVENTS = """\
def events():
    return [4, {}9]
"""
LOOPS = """\
from calc.core import events


def check(found, known):
    for one in found:
        assert one in known


def test_known():
    check(events(), [4, 9])
"""
COMPARES = """\
from calc.core import events


class Numbers(list):
    pass


def check(found, known):
    assert found == known
    for one in found:
        assert one


def test_known():
    check(events(), Numbers([4, 9]))
"""
TOKEN_TESTS = """\
from calc.core import Token


def test_known():
    assert Token("tea") == Token("tea", 1)
"""


@pytest.mark.longer
@pytest.mark.parametrize(
    ("before", "after", "tests", "has_twin"),
    [
        (TOKENS, TOKENS + EQUAL_TOKENS, TOKEN_TESTS, False),
        (
            TOKENS + EQUAL_TOKENS.replace("self.line)", "2)"),
            TOKENS + EQUAL_TOKENS,
            TOKEN_TESTS,
            False,
        ),
        (
            TOKENS.replace("line=1", "line=2") + EQUAL_TOKENS,
            TOKENS + EQUAL_TOKENS,
            TOKEN_TESTS,
            True,
        ),
        (EVENTS.format("5, "), EVENTS.format(""), LOOPS, False),
        (EVENTS.format("5, "), EVENTS.format(""), COMPARES, True),
    ],
    ids=[
        "a new equality",
        "a changed equality",
        "an equality that stays",
        "a loop",
        "a comparison",
    ],
)
async def test_an_argument_is_exchanged_only_where_each_correct_fix_compares_it(
    tmp_path: Path, before: str, after: str, tests: str, has_twin: bool
) -> None:
    """Another fix may make an equality that ignores it, or never enter the helper's loop."""
    base: Edits = {"calc/__init__.py": "", "calc/core.py": before}
    row = tiny_instance(
        test_patch=diff_of({"tests/test_all.py": tests}, base),
        fail_to_pass=("tests/test_all.py::test_known",),
        pass_to_pass=(),
    )
    row = row.model_copy(update={"gold_patch": diff_of({"calc/core.py": after}, base)})
    chosen = await choose_twins(row, sandboxes_of(base, tmp_path), wanted=1, runs=1)

    assert bool(chosen.report.twins) is has_twin, chosen.report.without


@pytest.mark.longer
async def test_no_forger_that_judges_is_paid(make_sandbox: MakeSandbox) -> None:
    """Those that win by chance are left to `python -m benchmarks.gradings --forgers 4`."""
    chosen = await choose_twins(tiny_instance(), make_sandbox, wanted=2, runs=1)
    rewards = {}
    for forger in FORGERS:
        if not forger.by_chance:
            grade = await graded(chosen.instance, _forgery(forger), make_sandbox)
            rewards[forger.name] = grade.reward

    assert rewards == dict.fromkeys(rewards, 0.0)


def _forgery(forger: Forger) -> bytes:
    return _ending(forger.code)


def _ending(code: str) -> bytes:
    """The base's module with more code at its end."""
    base = BASE["calc/core.py"]
    assert isinstance(base, str)
    return diff_of({"calc/core.py": base + code})
