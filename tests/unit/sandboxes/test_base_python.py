"""A virtual environment is uploaded with the part of its interpreter that it needs."""

import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

from perdure.sandboxes.base import Mount
from perdure.sandboxes.guest.base_python import with_interpreters
from perdure.sandboxes.guest.folder_archives import pack


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A folder laid out like an installed Python."""
    library = tmp_path / "python" / "lib" / f"python3.{sys.version_info.minor}"
    (library / "site-packages" / "big").mkdir(parents=True)
    (library / "os.py").touch()
    (library / "site-packages" / "big" / "module.py").touch()
    (tmp_path / "python" / "bin").mkdir()
    return tmp_path / "python"


def environment_on(prefix: Path, folder: Path) -> Mount:
    folder.mkdir()
    (folder / "pyvenv.cfg").write_text(f"home = {prefix}/bin\nversion_info = 3.11\n")
    return Mount(folder, "/opt/tool")


def test_an_interpreter_follows_its_environment(prefix: Path, tmp_path: Path) -> None:
    """A sandbox without this host's folders gets the interpreter at the same path."""
    tool = environment_on(prefix, tmp_path / "tool")

    assert with_interpreters((tool,)) == (tool, Mount(prefix, str(prefix)))


def test_a_link_and_its_end_both_follow(prefix: Path, tmp_path: Path) -> None:
    """uv names its interpreters by a link to the newest patch release."""
    link = tmp_path / "python3.11"
    link.symlink_to(prefix)
    tool = environment_on(link, tmp_path / "tool")

    brought = {mount.target for mount in with_interpreters((tool,))}

    assert brought == {"/opt/tool", str(link), str(prefix)}


def test_an_interpreter_that_the_agent_mounts_is_not_sent_twice(
    prefix: Path, tmp_path: Path
) -> None:
    """An agent that names its own interpreter keeps it."""
    mounts = (environment_on(prefix, tmp_path / "tool"), Mount(prefix, str(prefix)))

    assert with_interpreters(mounts) == mounts


def test_the_systems_own_interpreter_is_not_sent(tmp_path: Path) -> None:
    """An interpreter in /usr is not uploaded."""
    mounts = (environment_on(Path("/usr"), tmp_path / "tool"),)

    assert with_interpreters(mounts) == mounts


def test_a_packed_interpreter_leaves_what_was_installed_beside_it(
    prefix: Path, tmp_path: Path
) -> None:
    """site-packages of the host's Python are not uploaded with every sandbox."""
    with tarfile.open(pack(prefix, tmp_path / "packs").path) as archive:
        names = archive.getnames()

    assert any(name.endswith("os.py") for name in names)
    assert not any("site-packages" in name for name in names)


def test_a_packed_environment_keeps_what_is_installed(tmp_path: Path) -> None:
    """Only interpreters are packed in part."""
    venv.create(tmp_path / "environment", with_pip=False)
    packages = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "environment")})
    Path(packages, "tool.py").touch()

    with tarfile.open(pack(tmp_path / "environment", tmp_path / "packs").path) as archive:
        assert any(name.endswith("site-packages/tool.py") for name in archive.getnames())


@pytest.mark.skipif(sys.base_prefix.startswith("/usr"), reason="this Python is the system's")
def test_a_packed_interpreter_runs(tmp_path: Path) -> None:
    """The packed part of our interpreter starts in another folder, with its standard library."""
    packed = pack(Path(sys.base_prefix), tmp_path / "packs")
    with tarfile.open(packed.path) as archive:
        archive.extractall(tmp_path / "elsewhere", filter="fully_trusted")
    python = tmp_path / "elsewhere" / "bin" / f"python3.{sys.version_info.minor}"

    script = "import asyncio, json, ssl, unittest, sys; print(sys.prefix)"
    done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == str(tmp_path / "elsewhere")
