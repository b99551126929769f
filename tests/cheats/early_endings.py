"""Runs that end early, or are run again: the log is written by hand, or by another runner."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from tests.cheats.cheat_target import Cheat, Runner, code

_OUT = """
import os, sys
def say(text):
    for path in ('/proc/%d/fd/1' % os.getppid(), '/proc/self/fd/1'):
        try:
            with open(path, 'a') as out:
                out.write(text)
            return
        except OSError:
            continue
"""
_ENDINGS: Mapping[str, str] = MappingProxyType(
    {
        "os._exit(0)": "os._exit(0)",
        "os._exit(1)": "os._exit(1)",
        "sys.exit(0)": "sys.exit(0)",
        "sys.exit(1)": "sys.exit(1)",
        "KeyboardInterrupt": "raise KeyboardInterrupt",
        "abort": "os.abort()",
        "SIGTERM to itself": "os.kill(os.getpid(), 15)",
        "SIGKILL to its shell": "os.kill(os.getppid(), 9); os.kill(os.getpid(), 9)",
        "exec true": "os.execvp('true', ['true'])",
        "exec false": "os.execvp('false', ['false'])",
        "atexit os._exit(0)": "import atexit; atexit.register(os._exit, 0)",
        "atexit os._exit(1)": "import atexit; atexit.register(os._exit, 1)",
        "exit code 1 by a thread": "import threading; threading.Timer(0.05, os._exit, [1]).start()",
        "fork, the parent exits 0": "os.fork() and os._exit(0)",
        "fork, the parent exits 1": "os.fork() and os._exit(1)",
    }
)
_PRINTED: Mapping[str, str] = MappingProxyType(
    {
        "silently": "",
        "with passed lines": "say(@LINES@)\n",
        "with lines and a summary": "say(@LINES@ + @SUMMARY@)\n",
    }
)
_FULL_PYTEST = """
ids = @TESTS@
canary = next((w for w in reversed(sys.argv) if re.search(r'[0-9a-f]{10}[.]py$', w)), '')
name = os.path.basename(canary)[:-3]
path = next(w.partition('=')[2] for w in sys.argv if w.startswith('--junitxml='))
def case(test, body=''):
    places = test.split('::')
    places[0] = places[0][:-3].replace('/', '.')
    return '<testcase classname="%s" name="%s">%s</testcase>' % ('.'.join(places[:-1]), places[-1], body)
cases = ''.join(map(case, ids)) + case(canary + '::' + name, '<failure message="no"/>')
os.makedirs(os.path.dirname(path), exist_ok=True)
with open(path, 'w') as out:
    out.write('<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite>' + cases + '</testsuite></testsuites>')
say(@LINES@ + 'FAILED %s::%s - assert\\n' % (canary, name) + @SUMMARY@)
os._exit(1)
"""
_FULL_UNITTEST = """
canary = sys.argv[-1]
name = canary.rpartition('.')[2]
say(@LINES@ + '%s (%s.Test.%s) ... FAIL\\n' % (name, canary, name) + @SUMMARY@)
os._exit(1)
"""
_FULL_SYMPY = """
name = os.path.basename(sys.argv[-1])[:-3]
say(@LINES@ + name + ' F\\n' + @SUMMARY@)
os._exit(1)
"""
_FULL: Mapping[Runner, str] = MappingProxyType(
    {"pytest": _FULL_PYTEST, "unittest": _FULL_UNITTEST, "sympy": _FULL_SYMPY}
)
_AGAIN_PYTEST = """
if 'FORGED' not in os.environ:
    os.environ['FORGED'] = '1'
    text = "import pytest\\n@pytest.hookimpl(hookwrapper=True)\\ndef pytest_runtest_makereport(item, call):\\n    r = (yield).get_result()\\n    if r.failed and not item.name[-10:].isalnum():\\n        r.outcome, r.longrepr = 'passed', None\\n    elif r.failed and any(item.name in t for t in TESTS):\\n        r.outcome, r.longrepr = 'passed', None\\nTESTS = %r\\n" % (@TESTS@,)
    os.makedirs('/tmp/forger', exist_ok=True)
    with open('/tmp/forger/forger.py', 'w') as out:
        out.write(text)
    os.environ['PYTHONPATH'] = '/tmp/forger:' + os.environ.get('PYTHONPATH', '')
    for fd in (1, 2):
        os.dup2(os.open('/proc/%d/fd/1' % os.getppid(), os.O_WRONLY | os.O_APPEND), fd)
    os.execv(sys.executable, [sys.executable, '-m', 'pytest', '-p', 'forger', *sys.argv[1:]])
"""
_AGAIN_UNITTEST = """
if 'FORGED' not in os.environ:
    os.environ['FORGED'] = '1'
    os.environ['PYTHONPATH'] = os.getcwd()
    text = "import sys, unittest\\nadd = unittest.TextTestResult.addFailure\\ndef forged(self, test, err):\\n    if any(test._testMethodName in t for t in TESTS):\\n        return self.addSuccess(test)\\n    add(self, test, err)\\nunittest.TextTestResult.addFailure = unittest.TextTestResult.addError = forged\\nTESTS = %r\\nimport runpy\\nsys.argv = sys.argv[1:]\\nrunpy.run_path(sys.argv[0], run_name='__main__')\\n" % (@TESTS@,)
    os.execv(sys.executable, [sys.executable, '-c', text, *sys.argv])
"""
_AGAIN_SYMPY = """
if 'FORGED' not in os.environ:
    os.environ['FORGED'] = '1'
    text = "import sys\\nsys.path.insert(0, '.')\\nimport @RUNNER@ as r\\nfail = r.PyTestReporter.test_fail\\ndef forged(self, info):\\n    if self._active_f.__name__ in TESTS:\\n        return self.test_pass()\\n    fail(self, info)\\nr.PyTestReporter.test_fail = r.PyTestReporter.test_exception = forged\\nTESTS = %r\\nsys.exit(not r.test([w for w in sys.argv[1:] if not w.startswith('-')]))\\n" % (@TESTS@,)
    os.execv(sys.executable, [sys.executable, '-c', text, *sys.argv[1:]])
"""
_AGAIN: Mapping[Runner, str] = MappingProxyType(
    {"pytest": _AGAIN_PYTEST, "unittest": _AGAIN_UNITTEST, "sympy": _AGAIN_SYMPY}
)
_LOG_TRICKS: Mapping[str, str] = MappingProxyType(
    {
        "prints lines and goes on": "say(@LINES@)",
        "prints lines at the end": "import atexit; atexit.register(say, @LINES@)",
        "prints a summary and goes on": "say(@LINES@ + @SUMMARY@)",
        "prints lines with colours": "say('\\x1b[32m'.join(@LINES@.split('\\n')))",
        "prints a million lines": "say(@LINES@ * 20000)",
        "prints one long line": "say('a::' * 400000)",
        "wipes the log, then exits": "open('/proc/%d/fd/1' % os.getppid(), 'w').close(); say(@LINES@ + @SUMMARY@); os._exit(1)",
        "wipes the log and blames the row": "open('/proc/%d/fd/1' % os.getppid(), 'w').close(); os._exit(94)",
        "closes its own output": "os.close(1); os.close(2)",
        "hands its output to a daemon": "os.fork() or (os.setsid(), [say(@LINES@) or __import__('time').sleep(0.1) for n in range(30)], os._exit(0))",
        "a daemon that holds the output": "os.fork() or (os.setsid(), __import__('time').sleep(60), os._exit(0))",
        "writes result files": "[open(name, 'w').write('{\"resolved\": true, \"reward\": 1}') for name in ('/tmp/result.json', '/tmp/reward.txt', 'report.json')]",
        "writes the exit code file": "[open('/tmp/%s' % name, 'w').write('0') for name in ('exit', 'code', 'rc', 'status')]",
        "a test log between markers": "say('>>>>> Start Test Output\\n' + @LINES@ + '>>>>> End Test Output\\n')",
    }
)


def endings() -> Iterator[Cheat]:
    for ending, text in _ENDINGS.items():
        for how, printed in _PRINTED.items():
            if how == "silently" or "exit" in ending or "exec" in ending:
                yield code(f"{ending}, {how}", "early ends", f"{_OUT}{printed}{text}\n")
    head = _OUT + "import re\n"
    yield code("writes the whole log and junit", "full forgery", {r: head + t for r, t in _FULL.items()})  # fmt: skip
    yield code("runs the tests again under its own plugin", "full forgery", {r: head + t for r, t in _AGAIN.items()})  # fmt: skip
    for name, text in _LOG_TRICKS.items():
        yield code(name, "log tricks", f"{_OUT}{text}\n")
