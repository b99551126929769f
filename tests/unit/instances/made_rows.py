"""Handmade rows in the layouts of public datasets whose rows may not be copied."""

import json
from pathlib import Path
from typing import Any

PARSER = """\
import dataclasses
import json
import re
import sys
from enum import Enum
from pathlib import Path


class TestStatus(Enum):
    PASSED = 1
    FAILED = 2
    SKIPPED = 3
    ERROR = 4


@dataclasses.dataclass
class TestResult:
    name: str
    status: TestStatus


def parse_test_output(stdout, stderr):
    found = re.findall(r"^(\\w+) \\((?:[\\w.]+)\\)(?: \\.\\.\\.)? (ok|FAIL|ERROR)$", stderr, re.M)
    names = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR"}
    return [TestResult(name, TestStatus[names[word]]) for name, word in found]


results = parse_test_output(Path(sys.argv[1]).read_text(), Path(sys.argv[2]).read_text())
tests = [{"name": result.name, "status": result.status.name} for result in results]
Path(sys.argv[3]).write_text(json.dumps({"tests": tests}, indent=2))
"""
"""In the form of the publisher's parser.py; it reads the output of unittest."""

RUN_SCRIPT = """\
#!/bin/bash
set -e
run_selected_tests() {
  IFS=',' read -r -a files <<<"$1"
  for file in "${files[@]}"; do python3 -m unittest -v "${file%.py}"; done
}
run_selected_tests "$1"
"""


MULTI_SWE = """\
import re
from dataclasses import dataclass

from multi_swe_bench.harness.instance import Instance
from multi_swe_bench.harness.test_result import TestResult


@Instance.register("{owner}", "{name}")
class MADE(Instance):
    def __init__(self, pr, config, *args, **kwargs):
        pass

    def parse_log(self, log):
        found = dict(map(reversed, re.findall(r"^(PASSED|FAILED) (tests/[\\w/]+\\.py::\\w+)", log, re.M)))
        of = lambda status: {{test for test, said in found.items() if said == status}}
        return TestResult(of("PASSED"), of("FAILED"), set())
"""
"""In the form of the publisher's classes of Python repositories; it reads pytest's summary."""


def install_multi_swe(site: Path, owner: str, name: str) -> None:
    """Install a package in the layout of multi-swe-bench 1.1.2 with the parser of one repository."""
    harness = site / "multi_swe_bench" / "harness"
    repos = harness / "repos" / "python" / owner
    repos.mkdir(parents=True)
    (site / "multi_swe_bench" / "__init__.py").touch()
    (harness / "instance.py").write_text(
        "class Instance:\n    _registry = {}\n\n    @classmethod\n    def register(cls, org, repo):\n"
        "        return lambda made: cls._registry.setdefault(f'{org}/{repo}', made)\n"
    )
    (harness / "test_result.py").write_text(
        "from dataclasses import dataclass\n\n\n@dataclass\nclass TestResult:\n"
        "    passed_tests: set\n    failed_tests: set\n    skipped_tests: set\n"
    )
    (repos / f"{name}.py").write_text(MULTI_SWE.format(owner=owner, name=name))
    facts = site / "multi_swe_bench-1.1.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: multi-swe-bench\nVersion: 1.1.2\n"
    )


def write_scripts(folder: Path, instance_id: str) -> None:
    """Write `run_scripts/<instance_id>/` next to the rows, as in the publisher's repository."""
    place = folder / "run_scripts" / instance_id
    place.mkdir(parents=True)
    (place / "run_script.sh").write_text(RUN_SCRIPT)
    (place / "parser.py").write_text(PARSER)


def r2e_row(**changes: Any) -> dict[str, Any]:
    """An R2E-Gym row in the publisher's layout; its image has one repository file, calc.py."""
    commit = "b" * 40
    file = {"file": {"path": "calc.py"}, "misc_line": None}
    test = {"file": {"path": "tests/test_calc.py"}, "misc_line": "new file mode 100644"}
    diffs = [
        {"header": file, "old_file_content": OLD, "new_file_content": NEW},
        {"header": test, "old_file_content": "", "new_file_content": TEST},
    ]
    return {
        "repo_name": "calc",
        "docker_image": f"namanjain12/calc_final:{commit}",
        "commit_hash": commit,
        "parsed_commit_content": json.dumps({"file_diffs": diffs, "new_commit_hash": commit}),
        "execution_result_content": json.dumps(
            {"test_file_names": ["test_1.py", "__init__.py"], "test_file_codes": [TEST, ""]}
        ),
        "expected_output_json": json.dumps(EXPECTED),
        "problem_statement": "[ISSUE]\nadd() subtracts.\n[/ISSUE]",
        "prompt": "not for the agent",
        **changes,
    }


OLD = "def add(a, b):\n    return a - b\n"
NEW = "def add(a, b):\n    return a + b\n"
TEST = (
    "from calc import add\n\n\nclass TestAdd:\n    def test_sum(self):\n        assert add(2, 3) == 5\n\n"
    "    def test_zero(self):\n        assert add(2, 0) == 2\n\n\n"
    "def test_wrong():\n    assert add(1, 1) == 3\n"
)
EXPECTED = {"TestAdd.test_sum": "PASSED", "TestAdd.test_zero": "PASSED", "test_wrong": "FAILED"}


def write_harbor(folder: Path, image: str, workdir: str = "/app", more: str = "") -> Path:
    """Write a Harbor task that gives half a reward for each of two checks of calc.py."""
    files = {
        "instruction.md": "add() subtracts.\n",
        "task.toml": HARBOR.format(image=image, workdir=workdir) + more,
        "environment/Dockerfile": f"FROM python:3.11\nWORKDIR {workdir}\nCOPY . .\n",
        "tests/test.sh": "#!/bin/bash\npython3 /tests/check.py >/logs/verifier/reward.txt\n",
        "tests/check.py": CHECK,
        "solution/solve.sh": "sed -i 's/a - b/a + b/' calc.py\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


HARBOR = """\
version = "1.0"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 120.0

[agent]
timeout_sec = 60.0

[environment]
docker_image = "{image}"
workdir = "{workdir}"
cpus = 1
memory_mb = 2048
storage = "1G"
"""
CHECK = """\
import sys

sys.path.insert(0, ".")
from calc import add

print((add(2, 3) == 5) / 2 + (add(2, 0) == 2) / 2)
"""


def write_compose(folder: Path, text: str) -> None:
    (folder / "environment").mkdir(exist_ok=True)
    (folder / "environment/docker-compose.yaml").write_text(text)
