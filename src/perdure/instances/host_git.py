"""Runs git on the host without any user's configuration: one-commit repositories and diffs of
trees. Paths and diffs are bytes. `graders` captures and applies an agent's diff.
"""

import datetime
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from perdure.errors import InstanceError, MissingDependency
from perdure.settings.process_environment import variables

SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "",
    "core.autocrlf": "false",
    "core.quotePath": "false",
    "safe.directory": "*",
    "gc.auto": "0",
}
IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "perdure"),
        ("EMAIL", "perdure@localhost"),
        ("DATE", "2000-01-01T00:00:00Z"),
    )
}
"""Fixed author and time, so that the same tree has the same commit on every worker."""

DATES = ("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE")

ATTRIBUTES = "* -text -ident -filter !eol !working-tree-encoding\n"
"""Overrides the tree's .gitattributes: a commit has exactly the bytes on disk, with CRLF."""
EXCLUDE = "__pycache__/\n*.py[co]\n.pytest_cache/\n.hypothesis/\n.mypy_cache/\n.ruff_cache/\n"
"""Keeps files that tests create out of diffs, because released trees often lack a .gitignore."""


def commit_all(tree: Path) -> str:
    """Make `tree` a repository with one commit of every file, and return the commit's id.

    Removes all git folders in the tree first.
    """
    for folder in sorted(tree.rglob(".git")):
        shutil.rmtree(folder) if folder.is_dir() and not folder.is_symlink() else folder.unlink()
    start(tree)
    commit = add_commit(tree, "base")
    git(tree, "repack", "-adq")
    (tree / ".git" / "info" / "exclude").write_text(EXCLUDE)
    return commit


def start(tree: Path) -> None:
    """Make `tree` an empty repository whose commits will have exactly the bytes on disk."""
    git(tree, "init", "-q", "--template=", "--initial-branch=main")
    info = tree / ".git" / "info"
    info.mkdir(exist_ok=True)
    (info / "attributes").write_text(ATTRIBUTES)


def add_commit(
    tree: Path, message: str, moment: datetime.datetime | None = None, work_tree: Path | None = None
) -> str:
    """Commit every file. The id depends on author, time, message and files."""
    dates = {} if moment is None else {name: f"{int(moment.timestamp())} +0000" for name in DATES}
    git(tree, "add", "-A", "-f", work_tree=work_tree)
    words = ("commit", "-q", "--allow-empty", "--no-verify", "--cleanup=verbatim", "-m", message)
    git(tree, *words, work_tree=work_tree, identity={**IDENTITY, **dates})
    return git(tree, "rev-parse", "HEAD").decode().strip()


def changed_paths(repository: Path, tree: Path) -> list[str]:
    """Paths that differ between the repository's commit and `tree`. Stages `tree` as a side effect."""
    _stage(repository, tree)
    names = _diff(repository, ["--name-only", "-z"])
    return [os.fsdecode(name) for name in names.split(b"\0") if name]


def diff(repository: Path, tree: Path, paths: Sequence[str]) -> bytes:
    """The binary-safe diff of these paths, from the repository's commit to `tree`."""
    if not paths:
        return b""
    _stage(repository, tree)
    return _diff(repository, ["--binary", "--full-index", "--no-color"], paths)


def git(
    tree: Path,
    *arguments: str,
    work_tree: Path | None = None,
    keep_open: Sequence[int] = (),
    identity: Mapping[str, str] = IDENTITY,
) -> bytes:
    """Run git in a repository. `keep_open`: descriptors that git holds until it ends. `identity`: the
    author and the time of a commit.

    Raises: InstanceError with git's message; MissingDependency.
    """
    settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
    place = [f"--git-dir={tree / '.git'}", f"--work-tree={work_tree or tree}"]
    where = [] if arguments[0] == "init" else place
    try:
        result = subprocess.run(
            ["git", *settings, *where, *arguments],
            cwd=work_tree or tree,
            env={**_environment(), **identity},
            capture_output=True,
            check=False,
            pass_fds=keep_open,
        )
    except FileNotFoundError as error:
        raise MissingDependency("git is not installed: apt-get install git") from error
    if result.returncode != 0:
        said = result.stderr.decode("utf-8", "replace").strip()
        raise InstanceError(f"git {arguments[0]} failed in the instance's tree: {said}")
    return result.stdout


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in variables().items() if not k.startswith("GIT_")}
    alone = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C.UTF-8"}
    return {**kept, **alone, "GIT_LITERAL_PATHSPECS": "1"}


def _stage(repository: Path, tree: Path) -> None:
    git(repository, "add", "-A", "-f", work_tree=tree)


def _diff(repository: Path, options: Sequence[str], paths: Sequence[str] = ()) -> bytes:
    fixed = ["diff", "--cached", "--no-ext-diff", "--no-textconv", "--no-renames"]
    return git(repository, *fixed, *options, "HEAD", "--", *paths)
