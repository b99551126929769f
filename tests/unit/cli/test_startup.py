"""What each quick command imports: CPU time before the answer is nearly all imports."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.episodes.episode import EpisodeParts
from perdure.storage.local_store import LocalStore
from perdure.types import RolloutRequest, RolloutStatus
from tests.stored_episodes import store_episode

TABLES = ("rich", "pygments")
ARRAYS = ("pyarrow", "numpy")
SERVICES = ("structlog", "boto3", "httpx", "starlette", "uvicorn", "ray", "jinja2", "datasets")
TEMPORAL = ("temporalio",)
SANDBOXES = (
    "perdure.sandboxes.providers",
    "perdure.dialects",
    "perdure.gateway",
    "perdure.engines",
)
DATA = ("pydantic", "asyncio", "perdure.settings.settings_tree")

HEAVY = {
    ("--help",): TABLES + ARRAYS + SERVICES + TEMPORAL + SANDBOXES + DATA,
    ("--version",): TABLES + ARRAYS + SERVICES + TEMPORAL + SANDBOXES + DATA,
    ("run", "--help"): TABLES + ARRAYS + SERVICES + TEMPORAL + SANDBOXES + DATA,
    ("run", "unknown", "--agent", "oracle"): ARRAYS,
    ("export", "--help"): TABLES + ARRAYS + SERVICES + TEMPORAL + SANDBOXES,
    ("settings",): TABLES + ARRAYS + SERVICES + TEMPORAL + SANDBOXES,
    ("show", "r/b-1"): TABLES + ARRAYS + SERVICES + TEMPORAL + SANDBOXES,
    ("show", "r/b-1", "--json"): TABLES + ARRAYS + SERVICES + TEMPORAL + SANDBOXES,
    ("instances", "list"): TABLES + ARRAYS + SERVICES + TEMPORAL + SANDBOXES,
    ("status",): TABLES + ARRAYS + SERVICES + SANDBOXES + ("temporalio.worker",),
}
"""Modules that a command must not import, by command line."""

PROGRAM = """
import sys
from perdure.cli.main import invoke
code = invoke(sys.argv[1:])
print(code, *sorted(sys.modules), file=sys.stderr)
"""

TAB = """
import os, sys
from perdure.cli.main import cli
try:
    cli.main([], prog_name="perdure", complete_var="_PERDURE_COMPLETE")
except SystemExit:
    print(0, *sorted(sys.modules), file=sys.stderr)
"""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """A home in `folder`, and none of our variables but the given ones."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PERDURE_", "TEMPORAL_"))}
    return {**kept, "PERDURE_HOME": str(folder / "home"), **variables}


def imported(program: str, *words: str, folder: Path, **variables: str) -> tuple[int, set[str]]:
    """Exit code of a command line in a fresh Python, and the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        check=True,
        cwd=folder,
        env=environment(folder, **variables),
        timeout=120,
    )
    code, *modules = done.stderr.decode().splitlines()[-1].split()
    return int(code), set(modules)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose home holds one finished rollout."""
    folder = tmp_path_factory.mktemp("startup")
    request = RolloutRequest(run_id="r", instance="d/b-1", agent="oracle")
    parts = EpisodeParts(request, RolloutStatus.CANCELLED, started_at=0.0, finished_at=1.0)
    asyncio.run(store_episode(LocalStore(folder / "home/store"), parts))
    return folder


@pytest.mark.parametrize("words", HEAVY, ids=" ".join)
def test_a_command_imports_only_what_it_needs(words: tuple[str, ...], home: Path) -> None:
    """No module of the command's list is loaded when it has answered."""
    # Nothing listens on port 1, so `status` fails after it has imported all it connects with.
    code, modules = imported(PROGRAM, *words, folder=home, TEMPORAL_ADDRESS="127.0.0.1:1")

    assert code == (2 if words == ("status",) or "unknown" in words else 0)
    assert [name for name in HEAVY[words] if name in modules] == []


@pytest.mark.parametrize("words", ["perdure ", "perdure status ", "perdure run --agent "])
def test_a_tab_key_opens_no_connection(words: str, home: Path) -> None:
    """Completion reads names and folders, and imports no SDK."""
    _, modules = imported(
        TAB,
        folder=home,
        _PERDURE_COMPLETE="bash_complete",
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split())),
    )

    heavy = TABLES + ARRAYS + SERVICES + TEMPORAL + SANDBOXES
    assert [name for name in heavy if name in modules] == []
