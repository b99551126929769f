"""Which folders of the host a sandbox sees through an overlay of its own."""

from pathlib import Path

import pytest

from perdure.sandboxes.base import Mount, SandboxSpec
from perdure.sandboxes.host import namespaces
from perdure.sandboxes.host.procfs import mount_points


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    return tmp_path / "etc"


def folders(etc: Path, *mounts: Mount, image: str | None = None) -> list[str]:
    """Those below the test's own folder."""
    spec = SandboxSpec("/testbed", image=image, mounts=mounts)
    found = namespaces.shared_folders(spec, etc)
    return [path for path in found if path.startswith(f"{etc.parent}/")]


def test_every_read_only_folder_is_seen_through_its_own_overlay(etc: Path) -> None:
    """The environment and /etc, but not what only this sandbox writes to, nor a single file."""
    for name in ("venv", "cache"):
        (etc.parent / name).mkdir()
    (etc.parent / "uv").touch()
    found = folders(
        etc,
        Mount(etc.parent / "venv", "/venv"),
        Mount(etc.parent / "cache", "/cache", writable=True),
        Mount(etc.parent / "uv", "/opt/uv"),
    )

    assert found == [str(etc), str(etc.parent / "venv")]


def test_one_overlay_covers_what_is_inside_it(etc: Path) -> None:
    """Also by a link: the kernel stacks only two overlays."""
    (etc.parent / "venv/lib").mkdir(parents=True)
    (etc.parent / "link").symlink_to("venv")
    names = ("venv/lib", "link", "venv")
    found = folders(etc, *(Mount(etc.parent / name, f"/{name}") for name in names))

    assert found == [str(etc), str(etc.parent / "venv")]


def test_nothing_that_is_mounted_below_a_folder_is_hidden(
    etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a partition of its own inside is bound as it is."""
    for name in ("venv", "venv-2"):
        (etc.parent / name).mkdir()
    points = [*mount_points(), f"{etc.parent}/venv/data", f"{etc.parent}/venv-2"]
    monkeypatch.setattr(namespaces, "mount_points", lambda: points)
    found = folders(etc, *(Mount(etc.parent / name, f"/{name}") for name in ("venv", "venv-2")))

    assert found == [str(etc), str(etc.parent / "venv-2")]


def test_an_image_has_none_of_the_hosts_programs(etc: Path) -> None:
    """Only what is mounted into it is shared."""
    (etc.parent / "venv").mkdir()

    assert folders(etc, Mount(etc.parent / "venv", "/venv"), image="python:3.11") == [
        str(etc.parent / "venv")
    ]
