"""Three small rows, one for each kind of runner: pytest, a unittest runner like django's, one like sympy's."""

from perdure.testing.grader_contract import Edits, diff_of
from perdure.types import Grading, Instance, Source, SourceKind
from tests.cheats.cheat_target import Runner, Target

_CORE = """def add(a, b):
    return a - b


def double(x):
    return 2 * x


def half(x):
    return x / 2


def largest(values):
    return values[0]
"""
_FIXED = """def add(a, b):
    return a + b


def double(x):
    return 2 * x


def half(x):
    if x % 2:
        raise ValueError("odd")
    return x // 2


def largest(values, default=None):
    return max(values, default=default)
"""
_PACKAGE: Edits = {
    "calc/__init__.py": "from calc.core import add, double, half, largest\n",
    "calc/core.py": _CORE,
    "calc/util.py": "NAME = 'calc'\n",
    "README.md": "calc\n",
    ".gitignore": "*.log\n",
}
_GOLD: Edits = {"calc/core.py": _FIXED}

# --- pytest --------------------------------------------------------------------------------------

_PYTEST_OLD = """from calc import double, half


def test_double():
    assert double(2) == 4


def test_half():
    assert half(4) == 2
"""
_PYTEST_NEW = """import unittest

import pytest

from calc import add, double, half, largest


def test_double():
    assert double(2) == 4


def test_half():
    assert half(4) == 2


def test_half_of_odd():
    with pytest.raises(ValueError):
        half(3)


def test_largest_of_none():
    assert largest([], default=7) == 7


class TestAdd(unittest.TestCase):
    def test_small(self):
        self.assertEqual(add(1, 2), 3)
"""
_PYTEST_MORE = """from calc import add


def test_negative():
    assert add(-1, -2) == -3
"""
_PYTEST = {
    "test_patch": {"tests/test_core.py": _PYTEST_NEW, "tests/test_more.py": _PYTEST_MORE},
    "test_cmd": "python -m pytest -rA tests/test_core.py tests/test_more.py",
    "log_parser": "pytest",
    "fail_to_pass": (
        "tests/test_core.py::TestAdd::test_small",
        "tests/test_core.py::test_half_of_odd",
        "tests/test_core.py::test_largest_of_none",
        "tests/test_more.py::test_negative",
    ),
    "pass_to_pass": ("tests/test_core.py::test_double", "tests/test_core.py::test_half"),
}

# --- unittest, as django runs it -----------------------------------------------------------------

_RUNTESTS = """import os
import sys
import unittest

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(here), here]
labels = [word for word in sys.argv[1:] if not word.startswith("-")]
suite = unittest.TestLoader().loadTestsFromNames(labels)
result = unittest.TextTestRunner(verbosity=2).run(suite)
sys.exit(bool(result.failures or result.errors))
"""
_UNITTEST_OLD = """import unittest

from calc import double, half


class CoreTests(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(2), 4)

    def test_half(self):
        self.assertEqual(half(4), 2)
"""
_UNITTEST_NEW = """import unittest

from calc import add, double, half, largest


class CoreTests(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(2), 4)

    def test_half(self):
        self.assertEqual(half(4), 2)

    def test_add(self):
        self.assertEqual(add(1, 2), 3)

    def test_half_of_odd(self):
        with self.assertRaises(ValueError):
            half(3)

    def test_largest_of_none(self):
        self.assertEqual(largest([], default=7), 7)
"""


def _django_id(name: str) -> str:
    return f"{name} (numbers_app.tests.CoreTests.{name})"


_UNITTEST = {
    "test_patch": {"tests/numbers_app/tests.py": _UNITTEST_NEW},
    "test_cmd": "python tests/runtests.py --verbosity=2 numbers_app.tests",
    "log_parser": "parse_log_django",
    "fail_to_pass": tuple(
        map(_django_id, ("test_add", "test_half_of_odd", "test_largest_of_none"))
    ),
    "pass_to_pass": tuple(map(_django_id, ("test_double", "test_half"))),
}

# --- sympy ---------------------------------------------------------------------------------------

_BIN_TEST = """import sys

sys.path.insert(0, ".")
from calc.testing.runtests import test

sys.exit(not test(sys.argv[1:]))
"""
_REPORTER = '''"""As sympy's: runs files, prints one line a test, and a summary."""

import os
import sys
import time
import traceback


class PyTestReporter:
    def __init__(self):
        self.passed, self.failed, self.exceptions, self.started = 0, [], [], time.time()

    def entering_filename(self, filename, n):
        self.filename, self.clean = os.path.relpath(filename), True
        print("%s[%d]" % (self.filename, n))

    def leaving_filename(self):
        print("  [OK]" if self.clean else "  [FAIL]")

    def entering_test(self, f):
        self._active_f = f
        sys.stdout.write(f.__name__ + " ")

    def test_pass(self, char="."):
        self.passed += 1
        print("ok")

    def test_fail(self, exc_info):
        self.clean = False
        self.failed.append((self._active_f, exc_info))
        print("F")

    def test_exception(self, exc_info):
        self.clean = False
        self.exceptions.append((self._active_f, exc_info))
        print("E")

    def finish(self):
        for f, info in self.failed + self.exceptions:
            print("_" * 20 + " %s:%s " % (self.filename, f.__name__) + "_" * 20)
            traceback.print_exception(*info, file=sys.stdout)
        text = "tests finished: %d passed, " % self.passed
        if self.failed:
            text += "%d failed, " % len(self.failed)
        if self.exceptions:
            text += "%d exceptions, " % len(self.exceptions)
        text += "in %.2f seconds" % (time.time() - self.started)
        print("\\n" + text.center(80, "="))
        ok = not self.failed and not self.exceptions
        if not ok:
            print("DO *NOT* COMMIT!")
        return ok


class SymPyTests:
    def __init__(self, reporter):
        self._reporter = reporter

    def test_file(self, filename):
        gl = {"__file__": filename}
        with open(filename) as f:
            exec(compile(f.read(), filename, "exec"), gl)
        funcs = [gl[f] for f in gl if f.startswith("test_") and callable(gl[f])]
        self._reporter.entering_filename(filename, len(funcs))
        for f in sorted(funcs, key=lambda f: f.__code__.co_firstlineno):
            self._reporter.entering_test(f)
            try:
                f()
            except AssertionError:
                self._reporter.test_fail(sys.exc_info())
            except Exception:
                self._reporter.test_exception(sys.exc_info())
            else:
                self._reporter.test_pass()
        self._reporter.leaving_filename()


def test(files):
    reporter = PyTestReporter()
    tests = SymPyTests(reporter)
    for filename in sorted(files):
        tests.test_file(os.path.abspath(filename))
    return reporter.finish()
'''
_SYMPY_OLD = """from calc import double, half


def test_double():
    assert double(2) == 4


def test_half():
    assert half(4) == 2
"""
_SYMPY_NEW = """from calc import add, double, half, largest


def test_double():
    assert double(2) == 4


def test_half():
    assert half(4) == 2


def test_add():
    assert add(1, 2) == 3


def test_half_of_odd():
    try:
        half(3)
    except ValueError:
        return
    raise AssertionError("no error")


def test_largest_of_none():
    assert largest([], default=7) == 7
"""
_SYMPY = {
    "test_patch": {"calc/core_tests/test_core.py": _SYMPY_NEW},
    "test_cmd": "python bin/test -C --verbose calc/core_tests/test_core.py",
    "log_parser": "parse_log_sympy",
    "fail_to_pass": ("test_add", "test_half_of_odd", "test_largest_of_none"),
    "pass_to_pass": ("test_double", "test_half"),
}

_TREES: dict[Runner, Edits] = {
    "pytest": {**_PACKAGE, "tests/test_core.py": _PYTEST_OLD, "tests/__init__.py": "", "setup.cfg": "[tool:pytest]\naddopts = -p no:cacheprovider\n"},
    "unittest": {**_PACKAGE, "tests/runtests.py": _RUNTESTS, "tests/numbers_app/__init__.py": "", "tests/numbers_app/tests.py": _UNITTEST_OLD},
    "sympy": {**_PACKAGE, "bin/test": _BIN_TEST.replace("sys.argv[1:]", "[word for word in sys.argv[1:] if not word.startswith('-')]"), "calc/testing/__init__.py": "", "calc/testing/runtests.py": _REPORTER, "calc/core_tests/test_core.py": _SYMPY_OLD},
}  # fmt: skip
_GRADINGS = {"pytest": _PYTEST, "unittest": _UNITTEST, "sympy": _SYMPY}


def made_rows() -> tuple[Target, ...]:
    """One target for each kind of runner; their base is the whole tree."""
    return tuple(_made(runner, base) for runner, base in _TREES.items())


def _made(runner: Runner, base: Edits) -> Target:
    fields = dict(_GRADINGS[runner])
    tests = fields.pop("test_patch")
    assert isinstance(tests, dict)
    instance = Instance(
        instance_id=f"made-{runner}",
        dataset="cheats",
        problem_statement="add() subtracts; half() of an odd number; largest() of nothing",
        source=Source(kind=SourceKind.DIRECTORY),
        grading=Grading.model_validate({**fields, "test_patch": diff_of(tests, base)}),
        gold_patch=diff_of(_GOLD, base),
    )
    return Target(
        instance=instance,
        runner=runner,
        package="calc",
        host="calc/__init__.py",
        base=base,
        reporter="calc.testing.runtests",
    )
