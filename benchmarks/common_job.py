"""The common job: a repository with two files, one wrong sign, one hidden test, a script of turns.

Every side gets the same repository, bubblewrap flags, commands and test, in the form that its own
documentation requires.
"""

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CALC = "def add(a, b):\n    return a - b\n"
README = "# calc\n\nOne function, `add`.\n"
TEST = "from calc import add\n\nassert add(2, 3) == 5, add(2, 3)\n"
ASSERTION = "        self.assertEqual(add(2, 3), 5)"
UNITTEST = f"""\
import unittest

from calc import add


class SumTests(unittest.TestCase):
    def test_add(self):
{ASSERTION}
"""
UNITTEST_PATH, UNITTEST_ID = "tests/sums/tests.py", "test_add (sums.tests.SumTests.test_add)"
RUNNER_PATH = "tests/runtests.py"
RUNNER = """\
import os
import sys
import unittest

here = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(here), here]
suite = unittest.TestLoader().loadTestsFromNames(sys.argv[1:])
result = unittest.TextTestRunner(verbosity=2).run(suite)
sys.exit(not result.wasSuccessful())
"""
STATEMENT = "add(2, 3) returns -1. Make `add` in calc.py return the sum of its arguments."
DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else "python3"
"""The Python that runs the hidden test and the small agent's loop: the same file in every sandbox."""

FIX = (
    "ls -la && cat calc.py",
    "sed -i 's/return a - b/return a + b/' calc.py",
    "git diff > patch.txt; cat patch.txt",
    f"echo {DONE} && cat patch.txt",
)

GOLD = b"""\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""

SANDBOX_PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/bin"


def commands(turns: int) -> tuple[str, ...]:
    """A script of `turns` turns: idle ones first, then the four that fix the bug."""
    return ("true",) * (turns - len(FIX)) + FIX


def script(turns: int) -> dict[str, Any]:
    """A script for the scripted engine: one bash call per turn."""
    calls = [
        {"content": "", "tool_calls": [{"name": "bash", "arguments": {"command": command}}]}
        for command in commands(turns)
    ]
    return {"default": {"turns": calls}}


def instance_ids(count: int) -> list[str]:
    return [f"toy-{number:04d}" for number in range(count)]


def make_tree(folder: Path) -> Path:
    """The two files, without a repository around them."""
    folder.mkdir(parents=True)
    (folder / "calc.py").write_text(CALC)
    (folder / "README.md").write_text(README)
    return folder


def pack(tree: Path) -> bytes:
    """The tree as tar.gz, as the store keeps it."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(tree, arcname=".")
    return packed.getvalue()


def make_repository(folder: Path) -> Path:
    """The two files as one commit."""
    make_tree(folder)
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "GIT_CONFIG_NOSYSTEM": "1"}
    identity = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "base"]):
        subprocess.run(["git", *arguments], cwd=folder, env=env, check=True)
    return folder


def bwrap_flags(repository: Path) -> list[str]:
    """The bubblewrap command of the peers' sandboxes, with the reference flags and the repository at /repo."""
    flags = ["--unshare-user-try", "--unshare-pid", "--unshare-net"]
    for path in ("/usr", "/bin", "/lib", "/lib64", "/etc"):
        if Path(path).exists():
            flags += ["--ro-bind", path, path]
    flags += ["--ro-bind", str(repository), "/repo", "--tmpfs", "/tmp"]
    flags += ["--proc", "/proc", "--dev", "/dev", "--new-session", "--die-with-parent"]
    return [*flags, "--setenv", "PATH", SANDBOX_PATH, "--setenv", "HOME", "/tmp"]


def write_swebench_rows(folder: Path, count: int) -> Path:
    """Write a folder that `mini-extra swebench --subset FOLDER --split test` reads."""
    folder.mkdir(parents=True)
    rows = [
        {"instance_id": name, "problem_statement": STATEMENT, "repo": "bench/calc"}
        for name in instance_ids(count)
    ]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


TASK_TOML = """\
version = "1.0"

[metadata]
author_name = "bench"
difficulty = "easy"

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 60.0
environment_mode = "separate"

[environment]
docker_image = "none"
build_timeout_sec = 60.0
cpus = 1
memory_mb = 1024
storage_mb = 1024
"""

HARBOR_TEST = f"""\
cd /app && git apply /logs/artifacts/patch.diff && cat > test_calc.py <<'END' && {PYTHON} test_calc.py
{TEST}END
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""


def write_harbor_tasks(folder: Path, count: int) -> Path:
    """Write Harbor task folders with a separate verifier."""
    for name in instance_ids(count):
        files: Mapping[str, str] = {
            "task.toml": TASK_TOML,
            "instruction.md": STATEMENT + "\n",
            "environment/README.md": "The sandbox is made by the benchmark's environment class.\n",
            "tests/test.sh": f"#!/bin/bash\n{HARBOR_TEST}",
        }
        for path, text in files.items():
            target = folder / name / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        (folder / name / "tests" / "test.sh").chmod(0o755)
    return folder
