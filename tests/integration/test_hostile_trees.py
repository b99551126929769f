"""Trees that an agent left to break its own capture: what no diff can hold is dropped and recorded."""

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from perdure.errors import NotFound
from perdure.graders.diff.diff_capture import BASE_GIT, CapturedPatch, capture
from perdure.graders.diff.git_diff_parser import parse
from perdure.sandboxes.base import Exec, Mount, Sandbox, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.grader_contract import make_repository
from perdure.types import Limits

FIX = "echo 'x = 1' >> calc/core.py"
DAEMON = rb"""
import glob, os
while True:
    for comm in glob.glob("/proc/[1-9]*/comm"):
        try:
            if open(comm).read() in ("git\n", "bash\n"):
                os.kill(int(comm.split("/")[2]), 9)
        except OSError:
            pass
    open("/tmp/hunts", "w").close()
"""


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A bubblewrap sandbox in which the test plays the agent."""
    provider = BubblewrapProvider(Settings(home=tmp_path / "home"))
    if missing := provider.check():
        pytest.skip("; ".join(missing))
    tree = tmp_path / "tree"
    tree.mkdir()
    make_repository(tree)
    prefixes = {Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
    mounts = (Mount(prefix, str(prefix)) for prefix in sorted(prefixes))
    spec = SandboxSpec(
        workdir="/testbed",
        tree=tree,
        mounts=(Mount(tree / ".git", BASE_GIT), *mounts),
        limits=Limits(disk_mb=256),
    )
    async with await provider.create(spec, f"p-hostile-{uuid4().hex[:8]}") as sandbox:
        yield sandbox


async def _captured(sandbox: Sandbox, script: str, **caps: Any) -> CapturedPatch:
    await sandbox.exec(f"{script}\n", cwd=sandbox.workdir, timeout=60)
    return await capture(sandbox, BASE_GIT, **caps)


def _paths(captured: CapturedPatch) -> set[str]:
    return {file.new_path.decode("utf-8", "backslashreplace") for file in parse(captured.data)} - {
        "calc/core.py"
    }


@dataclass(frozen=True)
class Tree:
    """What the agent does beside its fix; new files that are captured; words of the record."""

    script: str
    kept: frozenset[str] = frozenset()
    dropped: tuple[str, ...] = ()


TREES = {
    "a .GIT folder": Tree("mkdir -p a/.GIT; echo x > a/.GIT/config; echo y > a/b", frozenset({"a/b"}), ("a repository: a/.",)),
    "a .giT file": Tree("mkdir a; echo x > a/.giT; echo y > a/b", frozenset({"a/b"}), ("a repository: a/.",)),
    ".GIT at the root": Tree("mkdir .GIT; echo x > .GIT/config; echo y > b", frozenset({"b"}), ("a repository: .",)),
    "a link called .gitmodules": Tree("ln -s calc .gitmodules; echo y > b", frozenset({"b"}), ("refused by git: error: invalid path '.gitmodules'",)),
    "a nested repository": Tree("git init -q sub; echo 1 > sub/a", frozenset({"sub/a"}), ("a repository: sub/.git",)),
    "a hundred nested repositories": Tree("git init -q d; for n in $(seq 150); do cp -r d d$n; done; echo y > b", frozenset({"b"}), ("a repository: d",)),
    "unreadable files": Tree("echo 1 > secret; chmod 000 secret tests/test_old.py", frozenset({"secret"})),
    "unreadable folders": Tree("mkdir -p d/e; echo 1 > d/e/f; chmod 000 d/e d calc", frozenset({"d/e/f"})),
    "a closed tree": Tree("echo 1 > f; chmod -R a-rwx . 2>/dev/null; chmod 000 .", frozenset({"f"})),
    "a read-only tree": Tree("echo 1 > f; git init -q sub; chmod -R a-w .", frozenset({"f"}), ("a repository: sub/.git",)),
    "FIFOs and sockets": Tree("mkfifo pipe tests/pipe; python3 -c \"import socket as s; s.socket(1).bind('sock')\"; echo y > b", frozenset({"b"}), ("not a file: pipe", "not a file: tests/pipe", "not a file: sock")),
    "FIFOs that git reads": Tree("mkfifo .gitignore .gitattributes calc/.gitignore; echo y > b", frozenset({"b"}), ("not a file: .gitignore",)),
    "links that git reads": Tree("mkfifo /tmp/pipe; ln -s /tmp/pipe .gitignore; ln -s /dev/zero .gitattributes; echo y > b", frozenset({"b"}), ("not a file: .gitignore", "not a file: .gitattributes")),
    "odd names": Tree("touch -- $'a\\nb' $'\\xff\\xfe' $'-rf' $':(top)x' '$(id)' '*'; mkdir $'d\\n'; touch $'d\\n/f'", frozenset({"a\nb", "\\xff\\xfe", "-rf", ":(top)x", "$(id)", "*", "d\n/f"})),
    "a broken repository": Tree("rm -rf .git/objects .git/index; echo junk > .git/HEAD; echo y > b", frozenset({"b"})),
    "a FIFO for a repository": Tree("rm -rf .git; mkfifo .git; echo y > b", frozenset({"b"})),
    "traps in the configuration": Tree("git config core.fsmonitor 'touch /tmp/ran'; git config core.worktree /; git config filter.x.clean 'false'; git config filter.x.required true; echo '* filter=x' > .gitattributes; echo y > b", frozenset({"b", ".gitattributes"})),
    "an encoding that no one knows": Tree("echo '* working-tree-encoding=x-none' > .gitattributes; echo y > b", frozenset({"b", ".gitattributes"})),
    "deep folders": Tree("python3 -c \"import os\nfor n in range(300): os.mkdir('d'*100); os.chdir('d'*100)\nopen('f', 'w').close()\"; echo y > b", frozenset({"b"})),
    "links in a circle": Tree("ln -s loop loop; ln -s . here", frozenset({"loop", "here"})),
    "a huge file": Tree("truncate -s 100M core.1; head -c 11M /dev/zero > 'b i g'; echo y > b", frozenset({"b"}), ("too large: core.1", "too large: b i g")),
    "a tracked file that became huge": Tree("head -c 20M /dev/zero > tests/test_old.py; echo y > b", frozenset({"b"}), ("too large: tests/test_old.py",)),
    "a thousand generated files": Tree("mkdir -p node_modules/x env/lib; touch env/pyvenv.cfg; (cd env/lib; touch $(seq 1500)); (cd node_modules/x; touch $(seq 1500)); echo y > b", frozenset({"b"}), ("generated: 3001 untracked files",)),
    "60 MB of build output": Tree("mkdir -p build/lib; for n in $(seq 15); do head -c 4M /dev/urandom > build/lib/o$n; done; echo y > b", frozenset({"b"}), ("generated: 15 untracked files",)),
    "a folder that a tool made": Tree("mkdir -p calc/out/x new; (cd calc/out/x; touch $(seq 3000)); echo y > b; echo z > new/c", frozenset({"b", "new/c"}), ("generated: calc/out",)),
    "stray files everywhere": Tree("touch $(seq 3000)", dropped=("generated: 3000 untracked files",)),
    "9 MB of noise that no diff holds": Tree("mkdir new; head -c 9M /dev/urandom > new/data; echo y > b", frozenset({"b"}), ("generated: new",)),
    "a full disk of ignored files": Tree("echo y > b; echo '*.o' > .gitignore; head -c 1G /dev/zero > big.o; echo", frozenset({"b", ".gitignore"})),
}  # fmt: skip


@pytest.mark.parametrize("tree", TREES.values(), ids=[name.replace(" ", "-") for name in TREES])
async def test_a_fix_survives_what_lies_beside_it(agent: Sandbox, tree: Tree) -> None:
    """The diff holds the fix and every file that a diff can hold; the record names the others."""
    captured = await _captured(agent, f"{FIX}\n{tree.script}")

    assert (captured.refused, captured.too_large) == ("", False)
    assert b"+x = 1\n" in captured.data
    assert _paths(captured) == tree.kept
    said = "\n".join(captured.dropped)
    assert all(words in said for words in tree.dropped), captured.dropped
    assert tree.dropped or not captured.dropped


async def test_a_small_change_takes_few_processes(agent: Sandbox) -> None:
    """Starting them is most of what a capture costs. Pids of the sandbox are counted upwards."""
    before = int((await agent.exec("echo $$")).stdout)
    captured = await _captured(agent, f"{FIX}; echo y > b")
    after = int((await agent.exec("echo $$")).stdout)

    assert _paths(captured) == {"b"}
    assert after - before <= 20


REFUSALS = {
    "a full disk": "head -c 1G /dev/zero > /tmp/big; echo",
    "no inodes": "mkdir /tmp/d; cd /tmp/d; python3 -c \"for n in range(10**6): open(str(n), 'w').close()\"",
}


@pytest.mark.parametrize("script", REFUSALS.values(), ids=["full-disk", "no-inodes"])
async def test_where_no_diff_can_be_formed_there_is_a_verdict(agent: Sandbox, script: str) -> None:
    """An agent that leaves git no room gets a refusal with its reason, and no new attempt."""
    captured = await _captured(agent, f"{FIX}\n{script}")

    assert (captured.data, captured.too_large) == (b"", False)
    assert re.search("disk of the sandbox is full|No space left", captured.refused)


@pytest.mark.longer
async def test_forty_thousand_files_cost_no_fix(agent: Sandbox) -> None:
    """They are counted and left out, and the change beside them is captured."""
    script = "mkdir d; cd d; python3 -c \"for n in range(40000): open(str(n), 'w').close()\""

    captured = await _captured(agent, f"{FIX}\n{script}")

    assert (_paths(captured), captured.too_large) == (set(), False)
    assert "generated: d" in captured.dropped


async def test_a_change_of_the_projects_own_files_may_be_too_large(agent: Sandbox) -> None:
    """What git knows is never left out: a diff of it that exceeds the limit is said to be too large."""
    captured = await _captured(agent, "head -c 9M /dev/urandom > calc/core.py")

    assert (captured.data, captured.too_large) == (b"", True)


async def _exists(sandbox: Sandbox, path: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(NotFound):
                await sandbox.get(path)
                return
            await asyncio.sleep(0.01)


async def test_a_daemon_that_kills_the_capture_gets_a_verdict(agent: Sandbox) -> None:
    """Who ends the capture from inside loses its change, and the sandbox is not called lost."""
    await agent.put("/tmp/daemon.py", DAEMON)
    await agent.exec("for i in $(seq 2000); do echo $i > calc/$i.txt; done", timeout=60)
    await agent.start("daemon", Exec(["python3", "/tmp/daemon.py"]))
    await _exists(agent, "/tmp/hunts")

    captured = await capture(agent, BASE_GIT)

    assert (captured.data, captured.too_large) == (b"", False)
    assert captured.refused
