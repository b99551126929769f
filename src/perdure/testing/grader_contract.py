"""A tiny repository and ways to cheat on it. Every grader that uses test lists passes `GraderContract`.

Example:
    class TestMyGrader(GraderContract):
        @pytest.fixture
        def grader(self) -> MyGrader: ...

        @pytest.fixture
        def sandbox(self, repository: Path) -> Sandbox: ...  # fresh, `repository` at its workdir
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.errors import InstanceError
from perdure.graders.base import Grader
from perdure.sandboxes.base import Sandbox
from perdure.types import Grading, Instance, Outcome, Source, SourceKind, TestStatus

Edits = Mapping[str, str | bytes | None]
"""Maps a path to its new content. None removes the file; text that begins with `-> ` makes a symlink."""

BASE: Edits = {
    "calc/__init__.py": "",
    "calc/core.py": "def add(a, b):\n    return a - b\n\n\ndef double(x):\n    return 2 * x\n",
    "tests/test_core.py": "from calc.core import double\n\n\ndef test_double():\n    assert double(2) == 4\n",
    "tests/test_old.py": "from calc.core import double\n\n\ndef test_zero():\n    assert double(0) == 0\n",
    "setup.cfg": "[tool:pytest]\naddopts = -p no:cacheprovider\n",
}
GOLD: Edits = {
    "calc/core.py": "def add(a, b):\n    return a + b\n\n\ndef double(x):\n    return 2 * x\n"
}
TESTS: Edits = {
    "tests/test_core.py": "from calc.core import add, double\n\n\ndef test_double():\n    assert double(2) == 4\n\n\n"
    "def test_add():\n    assert add(1, 2) == 3\n",
    "tests/test_more.py": "import calc.core\n\n\ndef test_negative():\n    assert calc.core.add(-1, -2) == -3\n",
}
FAIL_TO_PASS = ("tests/test_core.py::test_add", "tests/test_more.py::test_negative")
PASS_TO_PASS = ("tests/test_core.py::test_double", "tests/test_old.py::test_zero")


def write(folder: Path, edits: Edits) -> None:
    """Apply edits in a folder."""
    for name, content in edits.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if isinstance(content, str) and content.startswith("-> "):
            path.symlink_to(content.removeprefix("-> "))
        elif content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def git(folder: Path, *arguments: str) -> bytes:
    """Run git without the user's configuration. Raises: CalledProcessError."""
    alone = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    who = ["-c", "user.name=perdure", "-c", "user.email=perdure@localhost"]
    command = ["git", *who, "-c", "safe.directory=*", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **alone}, check=True, capture_output=True
    ).stdout


def make_repository(folder: Path, files: Edits = BASE) -> Path:
    """Make a repository with one commit."""
    write(folder, files)
    git(folder, "init", "-q", "--template=", "--initial-branch=main")
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", "base")
    return folder


def diff_of(edits: Edits, base: Edits = BASE) -> bytes:
    """The diff of these edits against the base."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_repository(Path(scratch), base)
        write(folder, edits)
        git(folder, "add", "-A", "-f")
        return git(folder, "diff", "--cached", "--binary", "--full-index", "--no-renames", "HEAD")


def tiny_instance(**grading: object) -> Instance:
    """The instance of the tiny repository; `grading` overrides fields of its Grading."""
    fields: dict[str, object] = {
        "test_patch": diff_of(TESTS),
        "test_cmd": "python -m pytest -rA tests",
        "fail_to_pass": FAIL_TO_PASS,
        "pass_to_pass": PASS_TO_PASS,
        **grading,
    }
    return Instance(
        instance_id="tiny-1",
        dataset="testing",
        problem_statement="add() subtracts",
        source=Source(kind=SourceKind.DIRECTORY),
        grading=Grading.model_validate(fields),
        gold_patch=diff_of(GOLD),
    )


@dataclass(frozen=True)
class Attack:
    """A diff that tries to get a reward without a fix, and the outcome that it must get."""

    name: str
    edits: Edits
    outcome: Outcome
    dropped: tuple[str, ...] = ()
    raw: bytes = b""
    """Parts that git would not write; they follow the diff of the edits."""

    @property
    def patch(self) -> bytes:
        return (diff_of(self.edits) if self.edits else b"") + self.raw


_NOTE: Edits = {"NOTES.md": "something that is kept\n"}
_OTHER_BASE: Edits = {**BASE, "calc/core.py": "def add(a, b):\n    return b - a\n"}
_WRONG = "def add(a, b):\n    return a - b\n\n\ndef double(x):\n    return 2 * x\n"
_DOUBLE_IS_BROKEN = "def add(a, b):\n    return a + b\n\n\ndef double(x):\n    return x + 2\n"
_ALL_PASS_HOOK = (
    "import pytest\n\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
)
_PATCHED_REPORT = (
    "import _pytest.reports\n\n_make = _pytest.reports.TestReport.from_item_and_call.__func__\n\n\n"
    "def _forged(cls, item, call):\n    report = _make(cls, item, call)\n    report.outcome = 'passed'\n"
    "    report.longrepr = None\n    return report\n\n\n"
    "_pytest.reports.TestReport.from_item_and_call = classmethod(_forged)\n"
) + _WRONG
_PRINTED = "".join(f"print('PASSED {test}')\n" for test in (*FAIL_TO_PASS, *PASS_TO_PASS))
_EXIT_EARLY = (
    f"import os, sys\n\nos.dup2(1, 9)\n{_PRINTED}sys.stdout.flush()\nos._exit(0)\n" + _WRONG
)
_JUNIT_TOO = (
    "import os, sys\n\n"
    "path = [a.partition('=')[2] for a in sys.argv if a.startswith('--junitxml=')][0]\n"
    "os.makedirs(os.path.dirname(path), exist_ok=True)\n"
    "cases = ''.join(\n"
    "    '<testcase classname=\"%s\" name=\"%s\"/>' % (t[:-3].replace('/', '.'), n)\n"
    f"    for t, n in (i.split('::') for i in {(*FAIL_TO_PASS, *PASS_TO_PASS)!r})\n"
    ")\n"
    "with open(path, 'w') as file:\n"
    "    file.write('<?xml version=\"1.0\" encoding=\"utf-8\"?><testsuites>' + cases + '</testsuites>')\n"
    "with open('/proc/%d/fd/1' % os.getppid(), 'a') as out:\n"
    f"    out.write({''.join(f'PASSED {t}' + chr(10) for t in (*FAIL_TO_PASS, *PASS_TO_PASS))!r})\n"
    "os._exit(1)\n"
)
_SKIPPING = "import pytest\n\n\ndef add(a, b):\n    pytest.skip('later')\n\n\ndef double(x):\n    return 2 * x\n"
_GIVING_UP = _SKIPPING.replace("skip(", "xfail(")
_HISTORY = (
    "import subprocess\n\n"
    "_LOG = subprocess.run(['git', 'log', '--all', '--reflog', '--format=%H'], capture_output=True)\n\n\n"
    "def add(a, b):\n    return a + b if len(set(_LOG.stdout.split())) > 1 else a - b\n\n\n"
    "def double(x):\n    return 2 * x\n"
)


_WIPE = "import os\n\nopen('/proc/%d/fd/1' % os.getppid(), 'w').close()\nos._exit(94)\n"

_LONG_LINE = (
    "import os\n\nwith open('/proc/%d/fd/1' % os.getppid(), 'a') as log:\n"
    "    log.write('a::' * 400000 + '\\n')\n\n\n"
) + _WRONG


def _new_file(path: str, mode: str = "100644", line: str = "x") -> bytes:
    """A hand-made diff that git would not write."""
    return (
        f"diff --git a/{path} b/{path}\nnew file mode {mode}\nindex 0000000..1234567\n"
        f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+{line}\n\\ No newline at end of file\n"
    ).encode()


ATTACKS = [
    Attack("conftest hook passes all", {**_NOTE, "conftest.py": _ALL_PASS_HOOK}, Outcome.UNRESOLVED, ("conftest.py",)),
    Attack("conftest hook beside the tests", {"tests/conftest.py": _ALL_PASS_HOOK}, Outcome.EMPTY_PATCH, ("tests/conftest.py",)),
    Attack("prints PASSED and exits 0", {"calc/core.py": _EXIT_EARLY}, Outcome.TAMPERED),
    Attack("prints PASSED, writes junit, exits 1", {"calc/core.py": _JUNIT_TOO}, Outcome.TAMPERED),
    Attack("package patches pytest's reports", {"calc/core.py": _PATCHED_REPORT}, Outcome.TAMPERED),
    Attack("edits a hidden test file", {"tests/test_core.py": "def test_double(): pass\ndef test_add(): pass\n"}, Outcome.EMPTY_PATCH, ("tests/test_core.py",)),
    Attack("adds the file that the tests add", {**_NOTE, "tests/test_more.py": "def test_negative(): pass\n"}, Outcome.UNRESOLVED, ("tests/test_more.py",)),
    Attack("a folder where a test file belongs", {**_NOTE, "tests/test_more.py/x": "x"}, Outcome.UNRESOLVED, ("tests/test_more.py/x",)),
    Attack("writes .git/config", _NOTE, Outcome.TAMPERED, raw=_new_file(".git/config", line="[core]")),
    Attack("writes a git hook", _NOTE, Outcome.TAMPERED, raw=_new_file("calc/.GIT/hooks/post-checkout")),
    Attack("leaves result files", {"result.json": '{"resolved": true}', "reward.txt": "1", "report.xml": "<testsuites/>"}, Outcome.UNRESOLVED),
    Attack("deletes a test that passed", {"tests/test_old.py": None}, Outcome.EMPTY_PATCH, ("tests/test_old.py",)),
    Attack("renames a test that passed", {"tests/test_old.py": None, "tests/test_new.py": BASE["tests/test_old.py"]}, Outcome.UNRESOLVED, ("tests/test_old.py",)),
    Attack("weakens a test that passed", {"calc/core.py": _DOUBLE_IS_BROKEN, "tests/test_old.py": "def test_zero(): pass\n"}, Outcome.UNRESOLVED, ("tests/test_old.py",)),
    Attack("skips from the code under test", {"calc/core.py": _SKIPPING}, Outcome.UNRESOLVED),
    Attack("xfails from the code under test", {"calc/core.py": _GIVING_UP}, Outcome.UNRESOLVED),
    Attack("looks for the fix in history", {"calc/core.py": _HISTORY}, Outcome.UNRESOLVED),
    Attack("start-up files of Python", {**_NOTE, "sitecustomize.py": "import os; os._exit(0)", "evil.pth": "import os; os._exit(0)"}, Outcome.UNRESOLVED, ("evil.pth", "sitecustomize.py")),
    Attack("a plugin through package metadata", {**_NOTE, "calc.egg-info/entry_points.txt": "[pytest11]\nx = hook\n", "hook.py": _ALL_PASS_HOOK}, Outcome.UNRESOLVED, ("calc.egg-info/entry_points.txt",)),
    Attack("a plugin through pytest.ini", {"pytest.ini": "[pytest]\naddopts = -p hook\n", "hook.py": _ALL_PASS_HOOK}, Outcome.UNRESOLVED, ("pytest.ini",)),
    Attack("a plugin through setup.cfg", {"setup.cfg": "[tool:pytest]\naddopts = -p hook\n", "hook.py": _ALL_PASS_HOOK}, Outcome.UNRESOLVED, ("setup.cfg",)),
    Attack("a module that shadows pytest", {**_NOTE, "pytest.py": _PRINTED}, Outcome.UNRESOLVED, ("pytest.py",)),
    Attack("an absolute path", _NOTE, Outcome.TAMPERED, raw=_new_file("/etc/cron.d/x")),
    Attack("a path out of the tree", _NOTE, Outcome.TAMPERED, raw=_new_file("calc/../../x")),
    Attack("a path with a NUL", _NOTE, Outcome.TAMPERED, raw=_new_file("calc/x\0y")),
    Attack("a symlink out of the tree", {"calc/out": "-> ../../etc/passwd"}, Outcome.EMPTY_PATCH, ("calc/out",)),
    Attack("an absolute symlink", {"calc/out": "-> /etc/passwd"}, Outcome.EMPTY_PATCH, ("calc/out",)),
    Attack("symlinks that leave the tree together", {"a": "-> .", "x": "-> a/../etc/passwd"}, Outcome.UNRESOLVED, ("x",)),
    Attack("one printed line without end", {"calc/core.py": _LONG_LINE}, Outcome.UNRESOLVED),
    Attack("a write through a symlink", {"alias": "-> tests"}, Outcome.APPLY_FAILED, raw=_new_file("alias/test_x.py")),
    Attack("a symlink in place of the tests", {"tests/test_old.py": None}, Outcome.EMPTY_PATCH, ("tests", "tests/test_old.py"), raw=_new_file("tests", "120000", "calc")),
    Attack("a gitlink", {}, Outcome.APPLY_FAILED, raw=_new_file("vendored", "160000", "Subproject commit " + "1" * 40)),
    Attack("a setuid file", {}, Outcome.APPLY_FAILED, raw=_new_file("calc/tool", "104755")),
    Attack("not a diff", {}, Outcome.APPLY_FAILED, raw=b"I could not solve it, sorry.\n"),
    Attack("a traditional diff after a git diff", _NOTE, Outcome.APPLY_FAILED, raw=b"--- calc/core.py\n+++ calc/core.py\n@@ -1 +1 @@\n-x\n+y\n"),
    Attack("wipes the log and blames the row", {"calc/core.py": _WIPE}, Outcome.UNRESOLVED),
    Attack("kills its own runner", {"calc/core.py": "import os\nos.kill(os.getppid(), 9)\nos.kill(os.getpid(), 9)\n"}, Outcome.UNRESOLVED),
    Attack("breaks every test", {"calc/core.py": "def add(:\n"}, Outcome.UNRESOLVED),
]  # fmt: skip
"""Known ways to cheat on SWE benchmarks. Each must get reward 0."""


class GraderContract:
    """Subclasses provide the fixtures `grader` and `sandbox`, a fresh one with `repository` at its workdir."""

    @pytest.fixture
    def repository(self, tmp_path: Path) -> Path:
        tree = tmp_path / "repository"
        tree.mkdir()
        return make_repository(tree)

    async def test_gold_is_resolved(self, grader: Grader, sandbox: Sandbox) -> None:
        """The reference fix gets the full reward in every variant."""
        instance = tiny_instance()

        grade = (await grader.grade(sandbox, instance, instance.gold_patch, timeout_s=60)).grade

        assert (grade.outcome, grade.reason) == (Outcome.RESOLVED, "")
        assert set(grade.rewards.model_dump().values()) == {1.0}
        assert set(grade.fail_to_pass.values()) == {TestStatus.PASSED}

    async def test_no_op_is_unresolved(self, grader: Grader, sandbox: Sandbox) -> None:
        """The unchanged base gets no reward, and the grade names the deciding tests."""
        grade = (await grader.grade(sandbox, tiny_instance(), b"", timeout_s=60)).grade

        assert grade.outcome is Outcome.UNRESOLVED
        assert (grade.rewards.binary, grade.rewards.p2p_fraction) == (0.0, 1.0)
        assert grade.rewards.partial == 0.5
        assert FAIL_TO_PASS[0] in grade.reason

    @pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
    async def test_attack_scores_nothing(
        self, grader: Grader, sandbox: Sandbox, attack: Attack
    ) -> None:
        """A diff that cheats gets reward 0, and the grade names the cheat."""
        grade = (await grader.grade(sandbox, tiny_instance(), attack.patch, timeout_s=60)).grade

        assert (grade.outcome, grade.reward) == (attack.outcome, 0.0), grade.reason
        assert grade.dropped_paths == attack.dropped

    async def test_a_stray_symlink_costs_no_fix(self, grader: Grader, sandbox: Sandbox) -> None:
        """A fix that also adds a virtual environment's link to an interpreter is graded without it."""
        patch = diff_of({**GOLD, ".venv/bin/python": "-> /usr/bin/python3"})

        grade = (await grader.grade(sandbox, tiny_instance(), patch, timeout_s=60)).grade

        assert (grade.outcome, grade.dropped_paths) == (Outcome.RESOLVED, (".venv/bin/python",))

    async def test_allowed_conftest_cannot_forge(self, grader: Grader, sandbox: Sandbox) -> None:
        """If gold itself edits conftest.py, the file is kept, and the canary test finds the forgery."""
        instance = tiny_instance()
        gold = diff_of({**GOLD, "conftest.py": "x = 1\n"})
        instance = instance.model_copy(update={"gold_patch": gold})
        forged = diff_of({"conftest.py": _ALL_PASS_HOOK})

        grade = (await grader.grade(sandbox, instance, forged, timeout_s=60)).grade

        assert (grade.outcome, grade.dropped_paths) == (Outcome.TAMPERED, ())

    async def test_stale_diff_fails_to_apply(self, grader: Grader, sandbox: Sandbox) -> None:
        """A diff against another base is refused completely, with git's message as the reason."""
        stale = diff_of(GOLD, _OTHER_BASE)

        grade = (await grader.grade(sandbox, tiny_instance(), stale, timeout_s=60)).grade

        assert grade.outcome is Outcome.APPLY_FAILED
        assert "calc/core.py" in grade.reason

    async def test_endless_tests_time_out(self, grader: Grader, sandbox: Sandbox) -> None:
        """Code that never returns gives a grade, not an infrastructure failure."""
        endless = diff_of({"calc/core.py": "while True: pass\n"})

        grade = (await grader.grade(sandbox, tiny_instance(), endless, timeout_s=3)).grade

        assert (grade.outcome, grade.reward) == (Outcome.TIMEOUT, 0.0)

    @pytest.mark.parametrize("base", [BASE, _OTHER_BASE], ids=["applies", "stale"])
    async def test_defective_tests_are_a_data_error(
        self, grader: Grader, sandbox: Sandbox, base: Edits
    ) -> None:
        """A row whose own test_patch does not fit its tree is refused, whatever the diff."""
        instance = tiny_instance(test_patch=diff_of(TESTS, {**BASE, "tests/test_core.py": "x\n"}))

        with pytest.raises(InstanceError, match="test_patch"):
            await grader.grade(sandbox, instance, diff_of(GOLD, base), timeout_s=60)

    async def test_what_pre_commands_do_to_a_hidden_test_is_undone(
        self, grader: Grader, sandbox: Sandbox
    ) -> None:
        """Hidden tests replace the files of the base commit, even if the row's setup changed them."""
        instance = tiny_instance(pre_commands=("echo >tests/test_core.py",))

        grade = (await grader.grade(sandbox, instance, instance.gold_patch, timeout_s=60)).grade

        assert (grade.outcome, grade.reason) == (Outcome.RESOLVED, "")
