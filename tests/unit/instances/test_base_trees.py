"""Archives become plain trees, and trees become repositories of one commit, byte for byte."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from perdure.errors import InstanceError, RetryHere
from perdure.instances import base_trees, host_git, uv_program
from perdure.storage.local_store import LocalStore
from perdure.types import Source, SourceKind


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def file(name: str, mode: int = 0o600) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.mode = mode
    return member


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


def commit_of(tree: Path, files: dict[str, bytes]) -> str:
    for name, data in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    return host_git.commit_all(tree)


def git(tree: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=tree, check=True, capture_output=True).stdout


def test_unpack_keeps_bytes_and_the_executable_bit(tmp_path: Path) -> None:
    """Content is unchanged and the top folder dropped; of modes only the executable bit is kept."""
    data = archive((file("p-1/a.txt"), b"x\r\n\xff"), (file("p-1/run", 0o4711), b""))
    base_trees.unpack(data, tmp_path, strip=1)

    assert (tmp_path / "a.txt").read_bytes() == b"x\r\n\xff"
    assert (tmp_path / "a.txt").stat().st_mode & 0o7777 == 0o644
    assert (tmp_path / "run").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize(
    "member",
    [
        file("p/../../evil"),
        file("/evil"),
        link("p/out", "../../evil"),
        link("p/out", "/etc/passwd"),
    ],
    ids=["dots", "absolute", "link up", "link to the host"],
)
def test_unpack_refuses_what_reaches_outside(tmp_path: Path, member: tarfile.TarInfo) -> None:
    """No member of an archive is written, or points, outside the tree."""
    with pytest.raises(InstanceError, match="outside"):
        base_trees.unpack(archive((member, b"")), tmp_path / "tree")

    assert not (tmp_path / "evil").exists()


def test_unpack_writes_through_no_link(tmp_path: Path) -> None:
    """A file below a link's name cannot be written where the link points."""
    data = archive((link("d", "elsewhere"), b""), (file("d/x"), b"x"), (file("elsewhere/y"), b"y"))

    with pytest.raises(InstanceError, match="cannot be unpacked"):
        base_trees.unpack(data, tmp_path)


def test_damaged_archive_is_the_instances_fault(tmp_path: Path) -> None:
    """A cut archive raises InstanceError, not another exception."""
    whole = archive((file("a"), b"x" * 100_000))

    with pytest.raises(InstanceError, match="cannot be unpacked"):
        base_trees.unpack(whole[: len(whole) // 2], tmp_path)


async def test_unpinned_release_is_refused(tmp_path: Path) -> None:
    """A requirement that may mean another release tomorrow is refused."""
    source = Source(kind=SourceKind.PYPI_SDIST, requirement="requests")

    with pytest.raises(InstanceError, match="name==version"):
        await base_trees.fetch(source, tmp_path / "tree", LocalStore(tmp_path / "store"))


UV_SAYS = [
    (
        "error: Request failed after 3 retries in 7s\n  Caused by: Failed to fetch:"
        " `http://127.0.0.1:9/flask/`\n"
        "  Caused by: tcp connect error\n  Caused by: Connection refused (os error 111)\n",
        RetryHere,
        "the package index cannot be reached: Connection refused (os error 111); check the network,"
        " HTTPS_PROXY, or set UV_DEFAULT_INDEX to a mirror",
    ),
    (
        "  × No solution found when resolving dependencies:\n  ╰─▶ Because there is no version of"
        " flask==99.0 and you require flask==99.0, we can conclude\n      that your requirements are"
        " unsatisfiable.\n",
        InstanceError,
        "`source.requirement` 'flask==99.0' cannot be used: × No solution found when resolving"
        " dependencies: ╰─▶ Because there is no version of flask==99.0 and you require flask==99.0,"
        " we can conclude that your requirements are unsatisfiable.",
    ),
]


@pytest.mark.parametrize(("stderr", "kind", "told"), UV_SAYS, ids=["away", "no such version"])
def test_what_the_index_lacks_is_told_once(
    monkeypatch: pytest.MonkeyPatch, stderr: str, kind: type[Exception], told: str
) -> None:
    """uv's nested causes become one sentence: the last cause and the variables, or the row's error."""

    def failed(*_: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess((), 2, b"", stderr.encode())

    monkeypatch.setattr(uv_program, "run", failed)
    with pytest.raises(kind) as raised:
        uv_program.locate_sdist.__wrapped__("flask==99.0")

    assert str(raised.value) == told


def test_same_tree_same_commit(tmp_path: Path) -> None:
    """A tree always has the same base commit: no clock, host or configuration affects it."""
    files = {"a.py": b"x = 1\n", "b/c.txt": b"\r\n"}

    assert commit_of(tmp_path / "tree", files) == "d4d012e36cfe007670edb0a8c4e6d8eaaedcfcbd"


def test_one_commit_holds_everything(tmp_path: Path) -> None:
    """The base is one commit without remotes, with ignored files and without foreign history."""
    tree = tmp_path / "tree"
    files = {".gitignore": b"*.log\n", "kept.log": b"x", "nested/.git/HEAD": b"ref", "n/x.py": b""}
    commit_of(tree, files)

    assert git(tree, "rev-list", "--all").count(b"\n") == 1
    assert git(tree, "ls-files").split() == [b".gitignore", b"kept.log", b"n/x.py"]
    assert git(tree, "status", "--porcelain", "--ignored") == b""


def test_attributes_change_no_bytes(tmp_path: Path) -> None:
    """A tree's own .gitattributes cannot make git normalize line endings."""
    tree = tmp_path / "tree"
    commit_of(tree, {".gitattributes": b"* text=auto eol=lf\n", "a.txt": b"a\r\nb\r\n"})

    assert git(tree, "show", "HEAD:a.txt") == b"a\r\nb\r\n"


def test_running_tests_is_no_edit(tmp_path: Path) -> None:
    """Caches of Python and pytest are no changes, even if a released tree ignores no files."""
    tree = tmp_path / "tree"
    commit_of(tree, {"a.py": b""})
    for name in ("__pycache__/a.pyc", ".pytest_cache/v", "b.py"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_bytes(b"")

    assert git(tree, "status", "--porcelain") == b"?? b.py\n"


async def test_a_folder_of_this_host_becomes_the_tree(tmp_path: Path) -> None:
    """Its files and symlinks are copied into the folder; its history is not."""
    source, tree = tmp_path / "source", tmp_path / "tree"
    commit_of(source, {"a.txt": b"x\r\n"})
    (source / "link").symlink_to("a.txt")
    tree.mkdir()
    await base_trees.fetch(
        Source(kind=SourceKind.DIRECTORY, path=str(source)), tree, LocalStore(tmp_path / "store")
    )

    assert sorted(path.name for path in tree.iterdir()) == ["a.txt", "link"]
    assert (tree / "link").readlink() == Path("a.txt")
