"""Makes instances from patches of a Debian source package that are upstream fixes. They are rows of
CPython, in the format of `rows.formats.cpython`.

The package becomes a git repository in the home: its upstream tree, then one commit for each patch.
A row's base is the commit before its patch, and its merge commit is the patch. Patches that change
compiled code come first, so one build of the interpreter serves all rows.
"""

import asyncio
import email
import email.policy
import functools
import hashlib
import io
import re
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from perdure.errors import InstanceError
from perdure.instances import base_trees, git_source, host_git
from perdure.instances.recipes import git_history
from perdure.instances.recipes.dataset_recipe import PatchSeries
from perdure.instances.rows.row_conversion import to_instance
from perdure.storage.base import Store
from perdure.types import Instance, slugify

SERIES = "debian/patches/series"
MODULES = "{modules}"
_FILE = re.compile(r"^\+\+\+ [^/\n]+/(\S+)", re.MULTILINE)
_DIFF = re.compile(r"^(---( |$)|diff --git |Index: )", re.MULTILINE)
_FIELD = re.compile(
    r"^(Origin|Bug|Bug-Debian|Forwarded|Author|Last-Update|From|Date): .*\n", re.MULTILINE
)
_PICKED = re.compile(r"^\(cherry picked from .*$", re.MULTILINE)
_MARKS = re.compile(r"\[(PATCH|3\.\d+)[^\]]*\]\s*|\s*\((GH-|gh-|#)\d+\)")


@dataclass(frozen=True)
class PatchRow:
    """The row of one patch."""

    series: PatchSeries
    patch: str

    @property
    def instance_id(self) -> str:
        return f"{self.series.repo.replace('/', '__')}-{slugify(PurePosixPath(self.patch).stem)}"

    @property
    def facts(self) -> str:
        return f"{self.patch} {self.series.model_dump_json(exclude={'rows'})}"

    async def make(self, dataset: str, store: Store) -> Instance:
        """Raises: InstanceError (no such patch, no test), RetryHere (unreachable archive)."""
        return await asyncio.to_thread(self._made, dataset)

    def _made(self, dataset: str) -> Instance:
        series = self.series
        clone = repository_of(series)
        merge = host_git.git(clone, "rev-parse", f"refs/tags/{self.patch}^{{commit}}")
        merged = merge.decode().strip()
        base = host_git.git(clone, "rev-parse", f"{merged}^").decode().strip()
        paths = git_source.changed_paths(str(clone), base, merged)
        modules = sorted({name for path in paths if (name := _module(path))})
        if not modules:
            raise InstanceError(f"{self.patch} changes no test module")
        row = {
            "instance_id": self.instance_id,
            "data_source": "cpython",
            "repo": series.repo,
            "base_commit": base,
            "merge_commit": merged,
            "problem_statement": self._statement(clone, merged),
            "source": {"kind": "git", "url": str(clone)},
            "install": list(series.install),
            "test_cmd": series.test_cmd.replace(MODULES, " ".join(modules)),
        }
        return to_instance(row, dataset, 1)

    def _statement(self, clone: Path, merged: str) -> str:
        told = host_git.git(clone, "show", "-s", "--format=%B", merged)
        name = f"{self.series.repo} {self.series.version.partition('-')[0]}"
        return git_history.statement(name, told.decode("utf-8", "replace"))


def repository_of(series: PatchSeries) -> Path:
    """The upstream tree and its patches as commits, each tagged with its file's name. It is made
    once.

    Raises: InstanceError (a patch does not apply), RetryHere (the archive is unreachable).
    """
    given = series.model_dump_json(include={"upstream", "packaging", "first"})
    digest = hashlib.sha256(given.encode()).hexdigest()[:16]
    return git_source.create_repository_once(f"patches-{digest}", functools.partial(_make, series))


def _make(series: PatchSeries, folder: Path) -> None:
    upstream = base_trees.download(series.upstream.url, series.upstream.sha256)
    packaging = base_trees.download(series.packaging.url, series.packaging.sha256)
    host_git.start(folder)
    base_trees.unpack(upstream, folder, strip=1)
    host_git.add_commit(folder, f"{series.package} {series.version}: upstream")
    patches = patches_of(packaging, series.first)
    compiled = {name for name, text in patches.items() if _compiles(text)}
    for name in sorted(patches, key=lambda name: name not in compiled):
        with tempfile.NamedTemporaryFile(prefix="perdure-patch-") as file:
            file.write(patches[name])
            file.flush()
            host_git.git(folder, "apply", file.name)
        host_git.add_commit(folder, message_of(patches[name]))
        host_git.git(folder, "tag", name)


def patches_of(packaging: bytes, first: str) -> dict[str, bytes]:
    """The patches from `first` on, in the order of the series. Raises: InstanceError."""
    with tarfile.open(fileobj=io.BytesIO(packaging)) as tar:
        lines = _member(tar, SERIES).decode().splitlines()
        names = [line.split()[0] for line in lines if line.strip() and line[0] != "#"]
        if first not in names:
            raise InstanceError(f"the package's series has no patch {first!r}")
        folder = PurePosixPath(SERIES).parent
        return {name: _member(tar, f"{folder}/{name}") for name in names[names.index(first) :]}


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    try:
        file = tar.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise InstanceError(f"the package has no file {name}")
    return file.read()


def message_of(patch: bytes) -> str:
    """The text above the diff, without mail headers and the marks of cherry-picks and Debian."""
    text = patch.decode("utf-8", "replace")
    found = _DIFF.search(text)
    head = text[: found.start()] if found else ""
    if re.search(r"^(From |Subject: |Description: )", head, re.MULTILINE):
        mail = email.message_from_string(
            re.sub(r"^From .*\n", "", head), policy=email.policy.default
        )
        subject = str(mail["Subject"] or mail["Description"] or "")
        head = f"{subject}\n\n{mail.get_payload()}"
    head = _MARKS.sub("", _PICKED.sub("", _FIELD.sub("", head)))
    return re.sub(r"\n{3,}", "\n\n", head).strip() + "\n"


def _compiles(patch: bytes) -> bool:
    changed = _FILE.findall(patch.decode("utf-8", "replace"))
    return any(path.endswith((".c", ".h")) or path == "configure" for path in changed)


def _module(path: str) -> str:
    """`Lib/test/test_email/test_email.py` -> `test_email`, its name in regrtest."""
    match = re.match(r"Lib/test/(test_\w+?)(\.py|/.*)$", path)
    return match[1] if match else ""
