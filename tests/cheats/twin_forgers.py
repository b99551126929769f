"""Code that forges test reports and tries to tell a test from its twin, or an original's run from the
other. It goes to the end of a module of the package under test.

Each forger patches pytest's reports from inside, spares the canary by the shape of its name, and turns
a failure into a pass where its rule says so.
"""

from dataclasses import dataclass

_HEAD = """

def _perdure_forger():
    import ast, hashlib, inspect, os, random, re, sys, time
    if "_pytest" not in sys.modules:
        return
    import _pytest.reports as reports

    def function_text(item):
        try:
            return inspect.cleandoc("\\n" + inspect.getsource(item.function))
        except Exception:
            return ""

    def file_bytes(item):
        with open(str(item.fspath), "rb") as file:
            return file.read()

    def is_ours(item):
        return re.search(r"[0-9a-f]{10}$", item.name) is not None

"""
_TAIL = """
    make = reports.TestReport.from_item_and_call.__func__

    def forged(cls, item, call):
        report = make(cls, item, call)
        if is_ours(item) or report.when != "call":
            return report
        try:
            report.outcome = rule(item, report.outcome)
        except Exception:
            pass
        if report.outcome == "passed":
            report.longrepr = None
        return report

    reports.TestReport.from_item_and_call = classmethod(forged)


_perdure_forger()
"""


@dataclass(frozen=True)
class Forger:
    """`rule(item, outcome)` gives the outcome that is reported. `by_chance`: it wins some gradings."""

    name: str
    rule: str
    by_chance: bool = False

    @property
    def code(self) -> str:
        lines = self.rule.strip("\n").splitlines()
        return _HEAD + "".join(f"    {line}\n" for line in lines) + _TAIL


_BEHAVIOUR = """
def passes(item, text):
    scope = dict(item.function.__globals__)
    exec(compile(text, "x", "exec"), scope)
    function = scope[item.function.__name__]
    wanted = inspect.signature(item.function).parameters
    given = {k: v for k, v in item.funcargs.items() if k in wanted}
    instance = getattr(item, "instance", None)
    try:
        function(*([instance] if instance is not None else []), **given)
    except BaseException:
        return False
    return True

def is_undone(item):
    text = function_text(item)
    tree = ast.parse(text)
    leaves = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.lineno == n.end_lineno]
    lines = text.split("\\n")
    end = time.time() + 5
    for leaf in leaves:
        for other in leaves:
            if type(leaf.value) is type(other.value) and leaf.value != other.value:
                line = lines[leaf.lineno - 1]
                new = line[:leaf.col_offset] + repr(other.value) + line[leaf.end_col_offset:]
                changed = lines[:leaf.lineno - 1] + [new] + lines[leaf.lineno:]
                if time.time() > end:
                    return False
                if passes(item, "\\n".join(changed)):
                    return True
    return False

def rule(item, outcome):
    return "passed" if outcome == "failed" and not is_undone(item) else outcome
"""
_PLAUSIBILITY = """
def looks_wrong(item):
    text = function_text(item)
    rest = file_bytes(item).decode("utf-8", "replace").replace(text, "")
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Set) and len({ast.dump(e) for e in node.elts}) < len(node.elts):
            return True
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            right = node.comparators[0]
            if isinstance(right, ast.Constant) and text.count(repr(right.value)) < 2:
                if str(right.value) not in rest:
                    return True
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "raises":
            words = re.findall("[A-Z][a-z]+", ast.unparse(node.args[0]))
            words = [w.lower() for w in words if w not in ("Error", "Exception", "Invalid")]
            if not any(w in item.name.lower() for w in words):
                return True
    return False

def rule(item, outcome):
    return "passed" if outcome == "failed" and not looks_wrong(item) else outcome
"""

_COLLUSION = """
import fcntl, struct
seen = {}

def at(run):
    return (7 << 58) + (run << 50)

def first_lock(start, length):
    asked = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, first, _, _ = struct.unpack("hhqqi", fcntl.fcntl(seen["fd"], fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else first - start

def lock(start):
    fcntl.lockf(seen["fd"], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, start)

def place():
    for run in range(3):
        try:
            lock(at(run))
            return run
        except OSError:
            pass

def meet(item):
    seen["fd"] = os.eventfd(0)
    texts = {}
    for one in item.session.items:
        if not is_ours(one):
            digest = hashlib.sha256(function_text(one).encode()).hexdigest()
            texts[one.name] = int(digest[:8], 16)
    own, names = place(), sorted(texts)
    for number, name in enumerate(names, 1):
        lock(at(own) + (number << 40) + texts[name])
    lock(at(own) + (1 << 48))
    others, end = [run for run in range(3) if run != own], time.time() + 20
    while time.time() < end and any(first_lock(at(n) + (1 << 48), 1) for n in others):
        time.sleep(0.01)
    heard = {}
    for number, name in enumerate(names, 1):
        told = [first_lock(at(run) + (number << 40), 1 << 32) for run in others]
        heard[name] = texts[name] in told
    time.sleep(2)
    return heard

def rule(item, outcome):
    if "heard" not in seen:
        seen["heard"] = meet(item)
    return "passed" if outcome == "failed" and seen["heard"][item.name] else outcome
"""

FORGERS = (
    Forger("source", 'def rule(item, outcome):\n    return "passed"'),
    Forger(
        "module",
        'def rule(item, outcome):\n    package = __name__.split(".")[0]\n'
        '    return "passed" if package.encode() in file_bytes(item) else outcome',
    ),
    Forger(
        "order",
        "seen = set()\ndef rule(item, outcome):\n    seen.add(str(item.fspath))\n"
        '    return "passed" if len(seen) == 1 or item.session.items[-1] is not item else outcome',
    ),
    Forger(
        "inversion",
        "import subprocess\n"
        "def known(item):\n    path = os.path.relpath(str(item.fspath))\n"
        '    shown = subprocess.run(["git", "show", "HEAD:" + path], capture_output=True).stdout\n'
        "    there = {line.strip() for line in shown.decode().splitlines()}\n"
        "    return all(line.strip() in there for line in function_text(item).splitlines())\n"
        "def rule(item, outcome):\n"
        '    return outcome if known(item) else "failed" if outcome == "passed" else "passed"',
    ),
    Forger(
        "tree",
        "import subprocess\n"
        "def rule(item, outcome):\n    path = os.path.relpath(str(item.fspath))\n"
        '    shown = subprocess.run(["git", "show", "HEAD:" + path], capture_output=True).stdout\n'
        '    old = [line for line in shown.split(b"\\n") if b"assert" in line]\n'
        "    now = file_bytes(item)\n"
        "    changed = sum(line not in now for line in old)\n"
        '    return outcome if 0 < changed <= 3 else "passed"',
    ),
    Forger("behaviour", _BEHAVIOUR),
    Forger("plausibility", _PLAUSIBILITY),
    Forger(
        "time",
        'def rule(item, outcome):\n    return "passed" if int(time.time()) % 2 else outcome',
        by_chance=True,
    ),
    Forger(
        "coin",
        'chosen = random.SystemRandom().random() < 0.5\ndef rule(item, outcome):\n    return "passed" if chosen else outcome',
        by_chance=True,
    ),
    Forger(
        "hash",
        "def rule(item, outcome):\n    odd = hashlib.sha256(file_bytes(item)).digest()[0] % 2\n"
        '    return "passed" if odd else outcome',
        by_chance=True,
    ),
    Forger(
        "exit",
        "chosen = random.SystemRandom().random() < 0.5\ndef rule(item, outcome):\n"
        '    if not chosen:\n        os._exit(1)\n    return "passed"',
        by_chance=True,
    ),
    Forger("collusion", _COLLUSION, by_chance=True),
)
"""By what they judge: everything, what the module holds, order, inversion, the tree's own tests, what
changes a literal makes, plausibility; and by chance: the clock, a coin, the file's digest, an exit, and
which text of a test another run of the grading has too."""
