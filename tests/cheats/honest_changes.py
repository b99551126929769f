"""Honest changes: the fix beside what agents leave behind must stay worth 1, and no fix must stay 0."""

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType

from perdure.testing.grader_contract import Edits
from tests.cheats.cheat_target import Control, Target

_BESIDE: Mapping[str, Edits] = MappingProxyType(
    {
        "documentation": {"docs/notes.md": "what was done\n", "CHANGELOG.md": "fixed\n"},
        "a test of its own": {"own_tests/test_own.py": "def test_own():\n    assert True\n"},
        "a conftest and settings": {"conftest.py": "x = 1\n", "pytest.ini": "[pytest]\n", "tox.ini": "[tox]\n"},
        "an absolute symlink": {".venv/bin/python": "-> /usr/bin/python3", ".venv/pyvenv.cfg": "home = /usr/bin\n"},
        "a chain of symlinks": {"a": "-> .", "b": "-> a/../../etc", "c": "-> README.md"},
        "caches": {"calc/__pycache__/core.cpython-311.pyc": b"\0" * 64, ".pytest_cache/v/x": "{}", ".mypy_cache/x": "{}"},
        "odd bytes in names and files": {"caf\u00e9.txt": b"caf\xe9\r\n", "crlf.txt": b"a\r\nb\r\n", "image.bin": bytes(range(256))},
        "nineteen hundred small files": {f"data/{n}.txt": f"{n}\n" for n in range(1900)},
        "a megabyte of text": {"data/big.txt": "line of a log\n" * 75000},
        "an executable script": {"tools/run.sh": "#!/bin/sh\nexit 0\n"},
        "package metadata": {"calc.egg-info/PKG-INFO": "Name: calc\n", "calc.egg-info/SOURCES.txt": "x\n"},
        "files named as canaries": {"own/test_0123456789.py": "def test_0123456789():\n    assert False\n"},
        "an ignored file that was added": {"build.log": "built\n"},
        "a new empty package": {"extra/__init__.py": "", "extra/more.py": "x = 1\n"},
    }
)  # fmt: skip
_LOUD: Mapping[str, str] = MappingProxyType(
    {
        "prints lines of results": "print('PASSED tests/x.py::test_x\\nFAILED tests/y.py::test_y\\nERROR z')\n",
        "logs to stderr": "import sys\nprint('loaded', file=sys.stderr)\n",
        "leaves a thread running": "import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n",
        "registers an atexit": "import atexit\natexit.register(lambda: None)\n",
        "writes into the temporary folder": "import tempfile\nopen(tempfile.mkstemp()[1], 'w').write('x')\n",
    }
)


def _beside(edits: Edits, target: Target) -> bytes:
    return target.instance.gold_patch + target.edited(edits)


def _loud(text: str, target: Target) -> bytes:
    return target.instance.gold_patch + target.infected(text)


def controls() -> Iterator[Control]:
    yield Control("gold", lambda target: target.instance.gold_patch)
    yield Control("nothing", lambda _: b"", reward=0.0)
    for name, edits in _BESIDE.items():
        yield Control(f"gold and {name}", partial(_beside, edits))
    for name, text in _LOUD.items():
        yield Control(f"gold that {name}", partial(_loud, text))
