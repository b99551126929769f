"""Makes a git repository whose commits are the releases of a package, and caches it in the home."""

import functools
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from perdure.errors import InstanceError
from perdure.instances import base_trees, git_source, host_git
from perdure.instances.recipes import changelog


def repository_of(package: str, versions: Sequence[str]) -> Path:
    """One commit per release, in order, with its files, changelog entry, time and tag. It is made
    once.

    Raises: InstanceError (no such release), RetryHere (the index is unreachable).
    """
    digest = hashlib.sha256(" ".join((package, *versions)).encode()).hexdigest()[:16]
    make = functools.partial(_make, package, versions)
    return git_source.create_repository_once(f"releases-{digest}", make)


def _make(package: str, versions: Sequence[str], folder: Path) -> None:
    host_git.start(folder)
    for version in versions:
        sdist = base_trees.download_sdist(f"{package}=={version}")
        if sdist.uploaded is None:
            raise InstanceError(f"the index does not say when {package} {version} was published")
        for path in folder.iterdir():
            if path.name != ".git":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        base_trees.unpack(sdist.data, folder, strip=1)
        text = changelog.entry(folder, version)
        host_git.add_commit(folder, f"{package} {version}\n\n{text}\n", sdist.uploaded)
        host_git.git(folder, "tag", version)
