"""Capturing, grading and calibrating in real sandboxes: what an agent did is what is graded."""

import os
import shutil
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import pytest

from perdure import limited_process
from perdure.errors import InstanceError, SandboxLost
from perdure.graders.diff.diff_capture import BASE_GIT, capture, prepare_capture
from perdure.graders.diff.git_diff_parser import parse
from perdure.graders.gold_and_base_check import calibrate, verify
from perdure.graders.protocols.eval_cmd import EvalCmdGrader
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.instances.host_git import commit_all
from perdure.sandboxes.base import Mount, Sandbox, SandboxProvider, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.local import LocalProvider
from perdure.sandboxes.providers.podman import PodmanProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.grader_contract import (
    BASE,
    FAIL_TO_PASS,
    GOLD,
    PASS_TO_PASS,
    TESTS,
    diff_of,
    git,
    make_repository,
    tiny_instance,
    write,
)
from perdure.types import Outcome

MakeSandbox = Callable[[str], Awaitable[Sandbox]]
LATIN_1 = "caf\xe9 = '\xfc'\n".encode("latin-1")
FILES = {
    **BASE,
    "crlf.txt": b"one\r\ntwo\r\nthree\r\n",
    "latin.py": LATIN_1,
    "image.bin": bytes(range(256)) * 8,
    "run.sh": "echo run\n",
    "link": "-> crlf.txt",
    ".gitignore": "*.log\nbuild/\n",
    ".gitattributes": "*.txt text=auto\n*.py filter=evil diff=evil\n",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    tree = tmp_path / "repository"
    tree.mkdir()
    write(tree, FILES)
    for path in tree.rglob("*"):  # so that git does not look at content only because all is new
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    commit_all(tree)
    return tree


async def _boot(
    provider: SandboxProvider,
    tree: Path,
    purpose: str = "agent",
    mounts: tuple[Mount, ...] = (),
    env: Mapping[str, str] = MappingProxyType({}),
) -> Sandbox:
    prefixes = {Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
    isolated = [Mount(prefix, str(prefix)) for prefix in sorted(prefixes)]
    spec = SandboxSpec(
        workdir="/testbed",
        tree=tree,
        mounts=(*isolated, *mounts) if provider.isolated else mounts,
        env={
            "PATH": f"{sys.prefix}/bin:{os.defpath}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # twice as fast
            **env,
        },
    )
    return await provider.create(spec, f"p-{purpose}-{uuid4().hex[:8]}")


@pytest.fixture
async def agent(repository: Path, tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A sandbox in which the test plays the agent."""
    async with await _boot(
        LocalProvider(Settings(home=tmp_path / "home", sandbox={"allow_local": True})), repository
    ) as sandbox:
        yield sandbox


@pytest.fixture
def make_sandbox(tmp_path: Path) -> MakeSandbox:
    """Fresh sandboxes of the tiny instance."""
    tree = tmp_path / "tiny"
    tree.mkdir()
    make_repository(tree)
    provider = LocalProvider(Settings(home=tmp_path / "home", sandbox={"allow_local": True}))

    async def make(purpose: str) -> Sandbox:
        return await _boot(provider, tree, purpose)

    return make


async def _act(sandbox: Sandbox, script: str) -> None:
    who = (
        "export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b"
    )
    await sandbox.exec(f"set -e\n{who}\n{script}", cwd=sandbox.workdir, check=True)


def _contents(tree: Path) -> dict[str, tuple[str, bytes, bool]]:
    """Every file below a folder: kind, content, executable. Git's own and ignored ones left out."""
    found = {}
    for path in sorted(tree.rglob("*")):
        name = str(path.relative_to(tree))
        if any(part.startswith(".git.") or part == ".git" for part in path.parts):
            continue
        if path.is_symlink():
            found[name] = ("link", os.readlink(path).encode(), False)
        elif path.is_file():
            found[name] = ("file", path.read_bytes(), bool(path.stat().st_mode & stat.S_IXUSR))
    return found


ACTIONS = {
    "edit": "echo 'x = 1' >> calc/core.py",
    "untracked": "mkdir -p new/deep && echo hello > 'new/deep/a file.txt' && touch empty",
    "odd names": "touch 'caf\u00e9.txt' $'tab\\there' $'line\\nbreak' 'quo\"te' 'back\\slash' ' b'",
    "binary": r"printf '\0\1\2\377' >> image.bin && printf '\0new' > other.bin",
    "crlf": r"printf 'one\r\n2\r\nthree\r\nfour\n' > crlf.txt && printf 'a\r\n' > new.txt",
    "crlf to lf": r"printf 'one\ntwo\nthree\n' > crlf.txt",
    "latin-1": r"printf '\344 = 1\n' >> latin.py",
    "no newline at end": "printf 'y = 2' >> calc/core.py",
    "delete": "rm latin.py link",
    "rename": "git mv calc/core.py calc/kernel.py && mv run.sh walk.sh",
    "symlink": "ln -s calc/core.py alias && ln -sfn latin.py link",
    "symlink to file": "rm link && echo text > link",
    "file to symlink": "rm run.sh && ln -s crlf.txt run.sh",
    "file to folder": "rm run.sh && mkdir run.sh && echo x > run.sh/main",
    "chmod": "chmod +x run.sh",
    "commit": "echo 1 > one && git add -A && git commit -qm one && echo 2 > two && git add two",
    "commit and amend": "echo 1 >> run.sh && git commit -qam 1 --amend",
    "branch": "git checkout -qb other && echo 1 > one && git add -A && git commit -qm 1 && git checkout -q main && echo 2 > two",
    "orphan history": "git checkout -q --orphan fresh && echo 1 > one && git add -A && git commit -qm 1",
    "skip-worktree": "git update-index --skip-worktree run.sh && echo hidden >> run.sh",
    "assume-unchanged": "git update-index --assume-unchanged run.sh && echo hidden >> run.sh",
    "same size and time": "cp -p run.sh t && printf 'echo ran\\n' > run.sh && touch -r t run.sh && rm t",
    "no .git": "rm -rf .git && echo x >> run.sh",
    "broken .git": "echo nonsense > .git/HEAD && rm -rf .git/objects .git/index && echo x >> run.sh",
    "info/exclude": "mkdir -p .git/info && echo '*' > .git/info/exclude && echo x > kept.txt",
    "nested repository with a commit": "git init -q sub && cd sub && echo 1 > a && git add a && git commit -qm 1",
    "nested repository without commits": "git init -q sub && echo 1 > sub/a",
    "nested repository in a tracked folder": "git init -q calc && cd calc && echo 1 > a && git add -A && git commit -qm 1",
    "worktree link": "mkdir sub && echo 'gitdir: /nonexistent' > sub/.git && echo 1 > sub/a",
    "fifo and socket": "mkfifo pipe && rm run.sh && mkfifo run.sh && echo x > kept",
}  # fmt: skip


@pytest.mark.parametrize(
    "action", ACTIONS.values(), ids=[name.replace(" ", "-") for name in ACTIONS]
)
async def test_capture_round_trips(
    agent: Sandbox, repository: Path, tmp_path: Path, action: str
) -> None:
    """For any change of the agent, the captured diff turns a fresh tree into the same tree."""
    await _act(agent, action)

    captured = await capture(agent, repository / ".git")

    fresh = shutil.copytree(repository, tmp_path / "fresh", symlinks=True)
    (tmp_path / "patch").write_bytes(captured.data)
    git(fresh, "apply", "--whitespace=nowarn", str(tmp_path / "patch"))
    assert captured.data
    assert _contents(fresh) == _contents(Path(agent.workdir))


async def test_capture_of_nothing_is_empty(agent: Sandbox, repository: Path) -> None:
    """An untouched tree gives no bytes, and no file counts."""
    captured = await capture(agent, repository / ".git")

    assert (captured.data, captured.files, captured.too_large) == (b"", 0, False)


async def test_capture_repeats(agent: Sandbox, repository: Path) -> None:
    """Capturing twice gives the same bytes, nested repositories included."""
    await _act(agent, "git init -q sub && echo 1 > sub/a && echo 2 > b")

    first = await capture(agent, repository / ".git")
    second = await capture(agent, repository / ".git")

    assert first == second
    assert first.files == 2


async def test_capture_counts_ignored_files(agent: Sandbox, repository: Path) -> None:
    """Files that .gitignore excludes are counted, so that a user can see them missing."""
    await _act(agent, "mkdir build && touch build/a build/b note.log && echo x > kept.txt")

    captured = await capture(agent, repository / ".git")

    assert (captured.files, captured.ignored_files) == (1, 3)


async def test_capture_runs_nothing_of_the_agents(agent: Sandbox, repository: Path) -> None:
    """Hooks, fsmonitor, filters, textconv and external diffs that the agent configured never run."""
    await _act(
        agent,
        """
        evil="touch $PWD/../ran; cat"
        for key in core.fsmonitor diff.external filter.evil.clean diff.evil.textconv diff.evil.command; do
          git config "$key" "$evil"; git config --global "$key" "$evil"
        done
        git config core.attributesFile "$PWD/attributes"; echo '* filter=evil' > attributes
        mkdir -p .git/hooks; printf '#!/bin/sh\\n%s\\n' "$evil" > .git/hooks/post-index-change
        chmod +x .git/hooks/post-index-change; echo 'x = 1' >> calc/core.py; rm -f ../ran
        """,
    )

    captured = await capture(agent, repository / ".git")

    assert b"+x = 1\n" in captured.data
    assert not (Path(agent.workdir).parent / "ran").exists()


@pytest.mark.parametrize(
    ("limits", "script"),
    [
        ({"max_bytes": 10_000}, "head -c 9000 /dev/urandom >one; head -c 9000 /dev/urandom >two"),
        ({"max_files": 10}, "for n in $(seq 11); do echo $n > f$n; done"),
    ],
    ids=["bytes", "files"],
)
async def test_capture_never_truncates(
    agent: Sandbox, repository: Path, limits: dict[str, Any], script: str
) -> None:
    """Above the cap there is no diff at all, and it says so."""
    await _act(agent, script)

    captured = await capture(agent, repository / ".git", **limits)

    assert (captured.data, captured.too_large) == (b"", True)


async def test_capture_without_a_base_on_the_host(agent: Sandbox) -> None:
    """For images, a copy made before the agent starts sees its commits as well as its edits."""
    base = await prepare_capture(agent)
    await _act(
        agent, "echo 1 > one && git add -A && git commit -qm 1 && rm -rf .git && echo 2 > two"
    )

    captured = await capture(agent, base)

    assert {file.new_path for file in parse(captured.data)} == {b"one", b"two"}


async def test_capture_leaves_nothing_outside_its_sandbox(repository: Path, tmp_path: Path) -> None:
    """Where /tmp is the host's own, the copy and git's own folder lie in the sandbox and end with it."""
    provider, seen = (
        LocalProvider(Settings(home=tmp_path / "home", sandbox={"allow_local": True})),
        tmp_path / "seen",
    )
    git, real = tmp_path / "bin/git", shutil.which("git")
    git.parent.mkdir()
    git.write_text(f'#!/bin/sh\necho "$GIT_DIR" >>{seen}\nexec {real} "$@"\n')
    git.chmod(0o755)
    path = {"PATH": f"{git.parent}:{os.defpath}"}
    async with await _boot(provider, repository, env=path) as sandbox:
        folders = {Path(base := await prepare_capture(sandbox))}
        await _act(sandbox, "echo 1 > one")
        captured = await capture(sandbox, base)
        folders |= set(map(Path, filter(None, seen.read_text().split("\n"))))
        ours = provider.root / sandbox.identity

        assert b"one" in captured.data
        assert len(folders) == 2
        assert all(folder.is_relative_to(ours) for folder in folders)

    assert not ours.exists()


async def test_copy_for_the_capture_is_no_change_of_the_tree(
    repository: Path, tmp_path: Path
) -> None:
    """An image whose temporary files lie in the repository gets no copy of git's folder there."""
    provider = LocalProvider(Settings(home=tmp_path / "home", sandbox={"allow_local": True}))
    async with await _boot(provider, repository, env={"TMPDIR": "/testbed"}) as sandbox:
        base = await prepare_capture(sandbox)
        captured = await capture(sandbox, base)
        await sandbox.exec(["rm", "-rf", base], check=True)

    assert (captured.data, Path(base).parent) == (b"", Path("/tmp"))


async def test_capture_needs_a_base_that_the_agent_may_have_destroyed(agent: Sandbox) -> None:
    """Where the only base lies in the sandbox, an agent that destroys it gets a verdict and no new
    attempt."""
    await _act(agent, "rm -rf .git")

    captured = await capture(agent, None)

    assert (captured.data, captured.too_large) == (b"", False)
    assert "no repository" in captured.refused


async def test_capture_without_the_hosts_base_is_no_verdict(
    agent: Sandbox, repository: Path, tmp_path: Path
) -> None:
    """A base that the host should have given and did not is a lost sandbox, not a reward of 0."""
    await _act(agent, "echo 1 > one")

    with pytest.raises(SandboxLost, match="cannot be captured"):
        await capture(agent, tmp_path / "nowhere")


@pytest.mark.parametrize("mounted", [False, True], ids=["uploaded base", "mounted base"])
async def test_capture_in_isolation_sees_every_edit(
    repository: Path, tmp_path: Path, mounted: bool
) -> None:
    """In bubblewrap the pristine index is trusted for untouched files, and for those alone."""
    provider = BubblewrapProvider(Settings(home=tmp_path / "home"))
    if missing := provider.check():
        pytest.skip("; ".join(missing))
    base_git = repository / ".git"
    edits = f"{ACTIONS['same size and time']}; {ACTIONS['nested repository without commits']}"
    async with await _boot(provider, repository, mounts=(Mount(base_git, BASE_GIT),)) as sandbox:
        await _act(sandbox, edits)

        captured = await capture(sandbox, BASE_GIT if mounted else base_git)

    assert {file.new_path for file in parse(captured.data)} == {b"run.sh", b"sub/a"}


async def test_captured_fix_is_resolved(make_sandbox: MakeSandbox, tmp_path: Path) -> None:
    """The whole way: edited in one sandbox, captured, graded as resolved in another."""
    async with await make_sandbox("agent") as sandbox:
        write(Path(sandbox.workdir), GOLD)
        captured = await capture(sandbox, tmp_path / "tiny/.git")
    async with await make_sandbox("grade") as sandbox:
        graded = await SwebenchGrader().grade(sandbox, tiny_instance(), captured.data, timeout_s=60)

    assert graded.grade.outcome is Outcome.RESOLVED, graded.grade.reason
    assert b"passed" in graded.log
    assert (graded.junit or b"").startswith(b"<?xml")


async def test_captured_fix_is_resolved_in_podman(tmp_path: Path) -> None:
    """The same whole way with containers: another provider changes nothing about the verdict."""
    provider = PodmanProvider(Settings(home=tmp_path / "home"))
    if missing := provider.check():
        pytest.skip(missing[0])
    tree = tmp_path / "tiny"
    tree.mkdir()
    make_repository(tree)
    base_git = Mount(tree / ".git", BASE_GIT)
    async with await _boot(provider, tree, mounts=(base_git,)) as sandbox:
        for name, content in GOLD.items():
            assert content is not None
            await sandbox.write_file(name, content)
        captured = await capture(sandbox, BASE_GIT)
    async with await _boot(provider, tree, "grade") as sandbox:
        graded = await SwebenchGrader().grade(sandbox, tiny_instance(), captured.data, timeout_s=60)

    assert graded.grade.outcome is Outcome.RESOLVED, graded.grade.reason


async def test_a_log_that_costs_too_much_is_a_verdict(
    make_sandbox: MakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that no process can hold within its limits score 0, and are told apart from failures."""
    limited_process.end_all()  # their limit is another
    monkeypatch.setattr(limited_process, "MEMORY", 32 << 20)
    flood = (
        "import os\nwith open('/proc/%d/fd/1' % os.getppid(), 'a') as log:\n"
        "    print(*(f'PASSED t{n}' for n in range(200_000)), sep='\\n', file=log)\n"
    )
    patch = diff_of({"calc/core.py": flood + str(GOLD["calc/core.py"])})

    async with await make_sandbox("grade") as sandbox:
        graded = await SwebenchGrader().grade(sandbox, tiny_instance(), patch, timeout_s=60)
    limited_process.end_all()

    assert (graded.grade.outcome, graded.grade.reward) == (Outcome.UNPARSABLE, 0.0)
    assert "MiB of memory" in graded.grade.reason
    assert b"PASSED t199999" in graded.log


@pytest.mark.parametrize(
    ("patch", "outcome", "reward"),
    [(diff_of(GOLD), Outcome.RESOLVED, 1.0), (b"", Outcome.UNRESOLVED, 0.0)],
    ids=["gold", "nop"],
)
async def test_eval_cmd_grades_by_exit_code(
    make_sandbox: MakeSandbox, patch: bytes, outcome: Outcome, reward: float
) -> None:
    """Exit code 0 of the row's command, after pre_commands and with the hidden tests, is the reward."""
    instance = tiny_instance(
        protocol="eval_cmd",
        pre_commands=("echo 'THREE = 3' > three.py",),
        eval_cmd="python -c 'import three, calc.core as c; assert c.add(1, 2) == three.THREE' && test -f tests/test_more.py",
    )
    async with await make_sandbox("grade") as sandbox:
        graded = await EvalCmdGrader().grade(sandbox, instance, patch, timeout_s=60)

    assert (graded.grade.outcome, graded.grade.reward) == (outcome, reward), graded.log


async def test_failing_pre_commands_are_a_data_error(make_sandbox: MakeSandbox) -> None:
    """A row whose pre_commands fail is refused by name; no diff can be blamed for it."""
    instance = tiny_instance(pre_commands=("git checkout -f 1234567",))
    async with await make_sandbox("grade") as sandbox:
        with pytest.raises(InstanceError, match="pre_commands"):
            await SwebenchGrader().grade(sandbox, instance, b"", timeout_s=60)


async def test_calibration_computes_the_lists(make_sandbox: MakeSandbox, tmp_path: Path) -> None:
    """F2P and P2P come from running gold and the base; a test that flickers is in neither."""
    flicker = f"""
def test_flicker():
    "Passes twice, in whichever runs come first; there are six."
    for turn in range(2):
        try:
            return open({str(tmp_path)!r} + f"/turn-{{turn}}", "x").close()
        except FileExistsError:
            pass
    raise AssertionError
"""
    bare = tiny_instance(
        fail_to_pass=(),
        pass_to_pass=(),
        test_patch=diff_of({**TESTS, "tests/test_flicker.py": flicker}),
    )

    calibrated = await calibrate(bare, make_sandbox, runs=3, twins=0)

    grading = calibrated.instance.grading
    assert (grading.fail_to_pass, grading.pass_to_pass) == (FAIL_TO_PASS, PASS_TO_PASS)
    assert calibrated.report.unstable == ("tests/test_flicker.py::test_flicker",)


async def test_calibration_refuses_a_fix_that_fixes_nothing(make_sandbox: MakeSandbox) -> None:
    """An instance whose gold changes no test's fate is refused before anyone trains on it, and its
    first run is its last."""
    instance = tiny_instance(fail_to_pass=(), pass_to_pass=())
    useless = instance.model_copy(update={"gold_patch": diff_of({"NOTES.md": "x\n"})})
    used: list[str] = []

    async def make(purpose: str) -> Sandbox:
        used.append(purpose)
        return await make_sandbox(purpose)

    with pytest.raises(InstanceError, match="FAIL_TO_PASS would be empty"):
        await calibrate(useless, make, runs=3)
    assert sorted(used) == ["gold-1", "nop-1"]


async def test_calibration_says_what_the_environment_lacks(make_sandbox: MakeSandbox) -> None:
    """Where no test runs, the reason names the module or the option that is missing."""
    tests = diff_of({"tests/test_new.py": "import no_such_thing\n"})
    bare = tiny_instance(fail_to_pass=(), pass_to_pass=(), test_patch=tests)

    with pytest.raises(InstanceError, match="No module named 'no_such_thing'"):
        await calibrate(bare, make_sandbox, runs=1)


async def test_verification_keeps_the_rows_lists(make_sandbox: MakeSandbox) -> None:
    """If a row brings lists, calibration proves them by running the tests and does not change
    them."""
    instance = tiny_instance()

    calibrated = await verify(instance, make_sandbox, runs=1, twins=0)

    assert calibrated.instance == instance
    assert calibrated.report.fail_to_pass == 2


async def test_verification_refuses_wrong_lists(make_sandbox: MakeSandbox) -> None:
    """A published list that gold does not satisfy here is refused, with the test's name."""
    instance = tiny_instance(fail_to_pass=("tests/test_core.py::test_gone",))

    with pytest.raises(InstanceError, match="test_gone MISSING"):
        await verify(instance, make_sandbox, runs=1)
