"""One module reads the process's environment; everything else is handed its settings."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
READERS = ("getenv", "getenvb", "environ", "environb")
ALLOWED = {
    "src/perdure/settings/process_environment.py": "the one module",
    # Programs that run inside a sandbox, or as the process that holds one.
    "src/perdure/agents/in_sandbox/": "the agent's own process in the sandbox",
    "src/perdure/sandboxes/guest/in_sandbox/": "the guest",
    "src/perdure/sandboxes/relay/in_sandbox/": "the relay's program",
    "src/perdure/testing/": "the contract suites, which are tests",
}


def reads(source: str) -> list[int]:
    """Lines of a module that use the environment, under any name that it was imported by."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in READERS:
            if isinstance(node.value, ast.Name) and node.value.id in ("os", "posix"):
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
            found += [node.lineno for name in node.names if name.name in READERS]
    return found


@pytest.mark.parametrize("folder", ["src/perdure", "activities", "workflows", "workers"])
def test_no_other_module_reads_the_environment(folder: str) -> None:
    """A variable that is read elsewhere would be missing in docs/settings.md and in run.json."""
    found = [
        f"{name}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not (name := str(path.relative_to(ROOT))).startswith(tuple(ALLOWED))
        for line in reads(path.read_text())
    ]

    assert found == []


@pytest.mark.parametrize(
    "source",
    ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ as e"],
)
def test_a_read_is_seen(source: str) -> None:
    """The test above would notice each of these."""
    assert reads(source)


def test_every_exception_still_exists() -> None:
    """A module or folder that is gone needs no exception."""
    assert [name for name in ALLOWED if not (ROOT / name).exists()] == []
