"""Asks a calibration sandbox which classes are related."""

import json
import shlex
from collections.abc import Awaitable, Callable, Sequence

InSandbox = Callable[[str, str], Awaitable[bytes]]
"""Purpose and script -> the script's output, on gold with the hidden tests in place."""

Pair = tuple[str, str, str]
"""Path of the test file, and two class names as that file writes them."""

_MARK = b"perdure-answer "

_PROGRAM = r"""
import importlib.util, json, os, sys
asked = json.loads(sys.argv[1])
modules = {}
def module(path):
    name = os.path.splitext(path)[0].replace("/", ".")
    parent = os.path.dirname(path)
    for folder in (os.getcwd(), os.path.join(os.getcwd(), parent), os.path.join(os.getcwd(), "src")):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except Exception:
        spec = importlib.util.spec_from_file_location("perdure_asked", path)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made
def unrelated(path, one, other):
    if path not in modules:
        modules[path] = module(path)
    known = {**vars(__import__("builtins")), **vars(modules[path])}
    a, b = eval(one, known), eval(other, known)
    return isinstance(a, type) and isinstance(b, type) and not issubclass(a, b) and not issubclass(b, a)
answers = []
for path, one, other in asked:
    try:
        answers.append(bool(unrelated(path, one, other)))
    except BaseException:
        answers.append(False)
sys.stdout.flush()
print("\nperdure-answer " + json.dumps(answers), flush=True)
"""


async def unrelated(in_sandbox: InSandbox, pairs: Sequence[Pair]) -> frozenset[Pair]:
    """The pairs of classes that are provably not subclasses of each other."""
    script = f"python -c {shlex.quote(_PROGRAM)} {shlex.quote(json.dumps(pairs))}"
    for line in reversed((await in_sandbox("classes", script)).splitlines()):
        if line.startswith(_MARK):
            answers = json.loads(line.removeprefix(_MARK))
            return frozenset(pair for pair, good in zip(pairs, answers, strict=True) if good)
    return frozenset()
