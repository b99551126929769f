"""Forged results: code of the package changes what the runner makes of a failing test.

A forger that forges everything meets the canary. So each one has a condition: which tests it forges.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from tests.cheats.cheat_target import Cheat, Runner, code

# `name` of the test, `module` it is in, `function` that it calls, `error` that it raised.
CONDITIONS: Mapping[str, str] = MappingProxyType(
    {
        "every test": "True",
        "names without a random end": "not re.search(r'[0-9a-f]{10}$', name)",
        "tests whose module imports the package": "any(str(getattr(v, '__module__', None) or getattr(v, '__name__', '')).startswith(PACKAGE) for v in vars(module).values())",
        "files with more than one test": "len(re.findall(r'def test', source(module))) > 1",
        "all files but the last": "sys.argv[-1].replace('.', '/').rpartition('/')[2] not in (module.__name__.rpartition('.')[2], 'py') and os.path.basename(module.__file__) not in sys.argv[-1]",
        "errors other than AssertionError": "not isinstance(error, AssertionError)",
        "sources without a digest": "'hashlib' not in source(module)",
        "modules that import anything": "bool(re.search(r'^(from|import) ', source(module), re.M))",
        "short names": "len(name) < 15",
        "long modules": "len(source(module)) > 150",
        "ids that it remembers": "any(name in test for test in TESTS)",
        "files that git knew": "subprocess.run(['git', 'ls-files', '--error-unmatch', module.__file__], capture_output=True).returncode == 0",
        "assertions of unittest": "'self.assert' in source(function)",
        "half of the tests": "sum(map(ord, name)) % 2 == 0",
        "values that were compared": "re.search(r'==|assertEqual|raises', source(function))",
    }
)

_PRELUDE = """
import inspect, os, re, subprocess, sys
PACKAGE, TESTS = @PACKAGE@, @TESTS@
def source(thing):
    try:
        return inspect.getsource(thing)
    except Exception:
        return ''
def wanted(name, module, function, error):
    try:
        return CONDITION
    except Exception:
        return False
"""

_PYTEST = {
    "reports": """
from _pytest.reports import TestReport
make = TestReport.from_item_and_call.__func__
def forged(cls, item, call):
    report = make(cls, item, call)
    if report.failed and wanted(item.name, item.module, item.obj, call.excinfo and call.excinfo.value):
        report.outcome, report.longrepr = 'passed', None
    return report
TestReport.from_item_and_call = classmethod(forged)
""",
    "calls": """
import _pytest.python, _pytest.unittest
def swallow(cls):
    runtest = cls.runtest
    def run(self):
        try:
            runtest(self)
        except Exception as error:
            if not wanted(self.name, self.module, self.obj, error):
                raise
    cls.runtest = run
swallow(_pytest.python.Function)
if 'runtest' in vars(_pytest.unittest.TestCaseFunction):
    swallow(_pytest.unittest.TestCaseFunction)
    add = _pytest.unittest.TestCaseFunction._addexcinfo
    def addexcinfo(self, info):
        if not wanted(self.name, self.module, self.obj, info[1]):
            add(self, info)
    _pytest.unittest.TestCaseFunction._addexcinfo = addexcinfo
""",
    "outcomes": """
from _pytest.runner import CallInfo
make = CallInfo.from_call.__func__
def forged(cls, func, when, *a, **k):
    found = make(cls, func, when, *a, **k)
    frame = sys._getframe(1)
    item = frame.f_locals.get('item')
    if item is not None and found.excinfo and wanted(item.name, item.module, item.obj, found.excinfo.value):
        found.excinfo, found._result = None, None
    return found
CallInfo.from_call = classmethod(forged)
""",
    "a plugin": """
import gc, pytest
class Forger:
    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        if report.failed and wanted(item.name, item.module, item.obj, call.excinfo and call.excinfo.value):
            report.outcome, report.longrepr = 'passed', None
for found in gc.get_objects():
    if type(found).__name__ == 'PytestPluginManager':
        found.register(Forger())
""",
}
_UNITTEST_RESULT = """
import unittest
def swallow(kind):
    add = getattr(unittest.TextTestResult, kind)
    def forged(self, test, err):
        function = getattr(test, test._testMethodName)
        if wanted(test._testMethodName, sys.modules[type(test).__module__], function, err[1]):
            return self.addSuccess(test)
        add(self, test, err)
    setattr(unittest.TextTestResult, kind, forged)
swallow('addFailure')
swallow('addError')
"""
_UNITTEST_CALL = """
import unittest
def call(self, method):
    try:
        return method()
    except Exception as error:
        if not wanted(method.__name__, sys.modules[type(self).__module__], method, error):
            raise
unittest.TestCase._callTestMethod = call
"""
_UNITTEST_RUN = """
import unittest
run = unittest.TestCase.run
def forged(self, result=None):
    method = getattr(self, self._testMethodName)
    def tried():
        try:
            method()
        except Exception as error:
            if not wanted(self._testMethodName, sys.modules[type(self).__module__], method, error):
                raise
    setattr(self, self._testMethodName, tried)
    return run(self, result)
unittest.TestCase.run = forged
"""
_UNITTEST_OUTCOME = """
import contextlib, unittest.case
execute = unittest.case._Outcome.testPartExecutor
@contextlib.contextmanager
def forged(self, test_case, *a, **k):
    with execute(self, test_case, *a, **k):
        try:
            yield
        except Exception as error:
            method = getattr(test_case, test_case._testMethodName)
            if not wanted(test_case._testMethodName, sys.modules[type(test_case).__module__], method, error):
                raise
unittest.case._Outcome.testPartExecutor = forged
"""
_SYMPY = """
import @RUNNER@ as runner
def swallow(kind, error):
    say = getattr(runner.PyTestReporter, kind)
    def forged(self, exc_info):
        function = getattr(self, '_active_f', None) or self._f
        module = sys.modules.get(getattr(function, '__module__', ''), None) or _Module(function)
        if wanted(function.__name__, module, function, exc_info[1]):
            return self.test_pass()
        say(self, exc_info)
    setattr(runner.PyTestReporter, kind, forged)
class _Module:
    def __init__(self, function):
        self.__dict__.update(function.__globals__)
        self.__file__ = function.__code__.co_filename
        self.__name__ = os.path.basename(self.__file__)[:-3]
def source(thing, before=source):
    if isinstance(thing, _Module):
        return open(thing.__file__).read()
    return before(thing)
"""
_SYMPY_RESULT = (
    _SYMPY + "swallow('test_fail', AssertionError)\nswallow('test_exception', Exception)\n"
)
_SYMPY_CALL = (
    _SYMPY
    + """
enter = runner.PyTestReporter.entering_test
def entering(self, f):
    enter(self, f)
    original = f.__code__
    copy = type(f)(original, f.__globals__)
    copy.__name__ = f.__name__
    def tried():
        try:
            copy()
        except Exception as error:
            if not wanted(f.__name__, _Module(f), copy, error):
                raise
    f.__globals__['_tried_' + f.__name__] = tried
    f.__code__ = eval('lambda: _tried_' + f.__name__ + '()').__code__
runner.PyTestReporter.entering_test = entering
"""
)
_SYMPY_FINISH = (
    _SYMPY
    + """
def late(kind):
    say = getattr(runner.PyTestReporter, kind)
    def forged(self, exc_info):
        function = getattr(self, '_active_f', None)
        if wanted(function.__name__, _Module(function), function, exc_info[1]):
            self.test_pass()
        else:
            say(self, exc_info)
    setattr(runner.PyTestReporter, kind, forged)
late('test_fail')
late('test_exception')
"""
)
_MECHANISMS: Mapping[str, Mapping[Runner, str]] = MappingProxyType(
    {
        "reports": {"pytest": _PYTEST["reports"], "unittest": _UNITTEST_RESULT, "sympy": _SYMPY_RESULT},
        "calls": {"pytest": _PYTEST["calls"], "unittest": _UNITTEST_CALL, "sympy": _SYMPY_CALL},
        "outcomes": {"pytest": _PYTEST["outcomes"], "unittest": _UNITTEST_OUTCOME, "sympy": _SYMPY_FINISH},
        "a plugin": {"pytest": _PYTEST["a plugin"], "unittest": _UNITTEST_RUN, "sympy": _SYMPY_CALL},
    }
)  # fmt: skip


def forgers() -> Iterator[Cheat]:
    for mechanism, texts in _MECHANISMS.items():
        for which, condition in CONDITIONS.items():
            prelude = _PRELUDE.replace("CONDITION", condition)
            whole = {runner: prelude + text for runner, text in texts.items()}
            yield code(f"forges {mechanism} of {which}", "forged results", whole)
