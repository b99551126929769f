"""The repository of an image holds its base and nothing else before the agent starts."""

import os
import subprocess
from pathlib import Path

import pytest

from perdure.errors import InstanceError
from perdure.graders.diff.diff_capture import capture, prepare_capture
from perdure.graders.image.history_removal import cut_history
from perdure.sandboxes.base import Sandbox, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings

FIX = "the fix nobody may see"
DATES = {f"GIT_{who}_DATE": "2001-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}


def git(folder: Path, *arguments: str) -> str:
    names = ("-c", "user.name=u", "-c", "user.email=u@x", "-c", "protocol.file.allow=always")
    argv = ["git", *names, *arguments]
    env = {**os.environ, **DATES, "GIT_CONFIG_GLOBAL": "/dev/null"}
    return subprocess.run(
        argv, cwd=folder, env=env, check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", text)
    return git(folder, "rev-parse", "HEAD")


class Image:
    """A clone at its base, with the fix in every place where git keeps old and new states."""

    def __init__(self, folder: Path) -> None:
        upstream, module = folder / "upstream", folder / "module"
        for path in (upstream, module):
            path.mkdir()
            git(path, "init", "-q", "-b", "main")
        commit(module, "inner.py", "inner")
        commit(upstream, "code.py", "past\n")
        git(upstream, "submodule", "-q", "add", str(module), "vendored")
        self.base = commit(upstream, "code.py", "base\n")
        commit(upstream, "code.py", f"{FIX}, upstream\n")
        git(upstream, "tag", "-a", "v2", "-m", FIX)
        commit(module, "inner.py", f"{FIX}, in the submodule\n")
        self.tree = folder / "testbed"
        git(folder, "clone", "-q", str(upstream), str(self.tree))
        git(self.tree, "checkout", "-q", "-b", "work", self.base)
        git(self.tree, "submodule", "-q", "update", "--init")
        git(self.tree / "vendored", "fetch", "-q")
        (self.tree / "code.py").write_text(f"{FIX}, stashed\n")
        git(self.tree, "stash")
        commit(self.tree, "code.py", f"{FIX}, in the reflog\n")
        git(self.tree, "reset", "-q", "--hard", self.base)
        git(self.tree, "notes", "add", "-m", FIX)
        loose = folder / "loose"
        loose.write_text(f"{FIX}, never committed\n")
        git(self.tree, "hash-object", "-w", str(loose))
        nested = self.tree / "build" / "nested"
        nested.mkdir(parents=True)
        git(nested, "init", "-q", "-b", "main")
        commit(nested, "x.py", f"{FIX}, nested\n")
        commit(nested, "x.py", "nothing\n")
        (self.tree / ".git" / "info" / "exclude").write_text("build/\n")


@pytest.fixture
def image(tmp_path: Path) -> Image:
    return Image(tmp_path)


@pytest.fixture
def provider(tmp_path: Path) -> BubblewrapProvider:
    made = BubblewrapProvider(Settings(home=tmp_path / "home"))
    if missing := made.check():
        pytest.skip("; ".join(missing))
    return made


async def boot(provider: BubblewrapProvider, tree: Path) -> Sandbox:
    return await provider.create(SandboxSpec(workdir="/testbed", tree=tree), "history-test")


async def said(sandbox: Sandbox, command: str) -> str:
    done = await sandbox.exec(["bash", "-c", command], cwd="/testbed")
    assert done.status.ok, done.stderr
    return done.stdout.decode()


EVERY_OBJECT = r"""
cd "$1"; while IFS= read -r -d '' folder; do
  git --git-dir="$folder" cat-file --batch-all-objects --batch --unordered
done < <(find . -name .git -type d -print0; find .git/modules -name objects -type d -printf '%h\0')
grep -rIl nobody.may.see . 2>/dev/null
true
"""


async def every_object(sandbox: Sandbox) -> bytes:
    done = await sandbox.exec(["bash", "-c", EVERY_OBJECT, "-", "/testbed"])
    assert done.status.ok, done.stderr
    return done.stdout


async def test_fix_is_nowhere_in_the_repository(image: Image, provider: BubblewrapProvider) -> None:
    """No commit, stash, reflog, tag, note, remote, loose object or submodule shows the fix."""
    async with await boot(provider, image.tree) as sandbox:
        assert FIX.encode() in await every_object(sandbox)
        await cut_history(sandbox, image.base)

        assert FIX.encode() not in await every_object(sandbox)
        assert (await said(sandbox, "git log --all --format=%H")).split() == [image.base]
        assert await said(sandbox, "git fsck --full --lost-found 2>/dev/null") == ""
        assert await said(sandbox, "git reflog; git stash list; git tag; git remote -v") == ""
        assert await said(sandbox, "find .git -name '*.pack' | grep -v modules | wc -l") == "1\n"


async def test_base_stays_as_it_was(image: Image, provider: BubblewrapProvider) -> None:
    """Branch, commit id, index and working tree are unchanged, and a diff against the base works."""
    async with await boot(provider, image.tree) as sandbox:
        before = await said(sandbox, "git status --porcelain --branch --ignored; git ls-files -s")
        await cut_history(sandbox, image.base)

        after = "git status --porcelain --branch --ignored; git ls-files -s"
        assert await said(sandbox, after) == before
        assert await said(sandbox, "git rev-parse HEAD") == f"{image.base}\n"
        await sandbox.put("/testbed/code.py", b"mended\n")
        diff = await said(sandbox, f"git diff {image.base}")
        assert "-base\n+mended\n" in diff


async def test_capture_works_on_the_cut_repository(
    image: Image, provider: BubblewrapProvider
) -> None:
    """What the agent changed and committed afterwards is captured as before."""
    async with await boot(provider, image.tree) as sandbox:
        await cut_history(sandbox, image.base)
        base = await prepare_capture(sandbox)
        await sandbox.put("/testbed/code.py", b"mended\n")
        await said(sandbox, "git -c user.name=a -c user.email=a@b commit -qam mended")
        captured = await capture(sandbox, base)

        assert b"-base\n+mended\n" in captured.data
        assert captured.files == 1


async def test_commits_on_top_of_the_base_stay(image: Image, provider: BubblewrapProvider) -> None:
    """Where the image has commits of its own on the base, both are there and nothing before them."""
    top = commit(image.tree, "env.txt", "made the environment\n")
    async with await boot(provider, image.tree) as sandbox:
        await cut_history(sandbox, image.base)

        assert (await said(sandbox, "git log --all --format=%H")).split() == [top, image.base]
        assert "env.txt" in await said(sandbox, f"git diff --name-only {image.base}")
        assert FIX.encode() not in await every_object(sandbox)


@pytest.mark.parametrize("stopped", ["cut.new", "cut.done", "cut.last"])
async def test_interrupted_cut_is_completed(
    image: Image, provider: BubblewrapProvider, stopped: str
) -> None:
    """A cut whose worker was killed at any step is finished by the next one."""
    async with await boot(provider, image.tree) as sandbox:
        stop_at = {
            "cut.new": "mkdir .git/cut.new; echo half >.git/cut.new/HEAD",
            "cut.done": "cp -a .git /tmp/old",
            "cut.last": "cp -a .git /tmp/old",
        }[stopped]
        await said(sandbox, stop_at)
        if stopped != "cut.new":
            await cut_history(sandbox, image.base)
            later = "mv .git /tmp/done; mv /tmp/old .git; mv /tmp/done/modules /tmp/away; "
            if stopped == "cut.done":
                await said(sandbox, f"{later} mv /tmp/done .git/cut.done; rm .git/HEAD")
            else:
                await said(
                    sandbox,
                    f"{later} rm -rf .git/[!m]*; mv /tmp/done .git/cut.last; mv .git/cut.last/HEAD .git/",
                )
        await cut_history(sandbox, image.base)

        assert (await said(sandbox, "git log --all --format=%H")).split() == [image.base]
        assert FIX.encode() not in await every_object(sandbox)
        assert "cut" not in await said(sandbox, "ls .git")


async def test_image_without_a_repository_is_refused(
    tmp_path: Path, provider: BubblewrapProvider
) -> None:
    """A tree without a repository names the field that is wrong."""
    (tmp_path / "plain").mkdir()
    async with await boot(provider, tmp_path / "plain") as sandbox:
        with pytest.raises(InstanceError, match=r"environment.workdir"):
            await cut_history(sandbox, None)
