"""Files that Perdure writes are private to its user, except those that sandboxes mount."""

import asyncio
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.gateway.http.listening_sockets import bind_unix
from perdure.home_folder import keep_private, make_readable_by_sandboxes
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.storage.store_url import open_store


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_others(folder: Path) -> list[str]:
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if mode(p) & 0o077]


def test_new_files_are_private(tmp_path: Path) -> None:
    """A process of a home creates folders and files that no other user can read."""
    keep_private(Settings(home=tmp_path / "home"))
    (tmp_path / "home" / "logs").mkdir()
    (tmp_path / "home" / "logs" / "worker.log").write_text("x")

    assert mode(tmp_path / "home") == 0o700
    assert open_to_others(tmp_path / "home") == []


def test_files_of_an_earlier_version_are_closed(tmp_path: Path) -> None:
    """A database, logs and results that were readable for everyone are closed at the next start."""
    home = tmp_path / "home"
    for name in ("temporal.db", "temporal.db-wal", "logs/x.log", "run/seats/1",
                 "store/runs/r/patch.diff", "store/blobs/sha256/aa/hidden"):  # fmt: skip
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("x")
    keep_private(Settings(home=home))

    assert (mode(home), open_to_others(home)) == (0o700, [])
    assert (home / "store" / "runs" / "r" / "patch.diff").read_text() == "x"


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """The error says which setting is wrong."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="PERDURE_HOME"):
        keep_private(Settings(home=tmp_path / "file" / "home"))


def test_foreign_files_beside_a_store_stay_as_they_are(tmp_path: Path) -> None:
    """A store in a user's folder closes its own entries and leaves the others as they are."""
    (tmp_path / "data" / "runs").mkdir(parents=True)
    (tmp_path / "data" / "yours").mkdir()
    keep_private(Settings(home=tmp_path / "home", store=str(tmp_path / "data")))

    assert mode(tmp_path / "data" / "runs") == 0o700
    assert (mode(tmp_path / "data"), mode(tmp_path / "data" / "yours")) == (0o755, 0o755)


def test_a_home_that_a_command_makes_is_private(tmp_path: Path) -> None:
    """Before any `perdure up`, importing or building instances creates a private home."""
    open_store(Settings(home=tmp_path / "home"))

    assert (mode(tmp_path / "home"), mode(tmp_path / "home" / "store")) == (0o700, 0o700)


async def test_results_are_private(tmp_path: Path) -> None:
    """Objects of a local store contain hidden tests and gold patches, so only the owner can read
    them."""
    store = LocalStore(tmp_path / "store")
    await asyncio.gather(store.put("runs/a/b", b"x"), store.put_if_absent("blobs/c", b"x"))

    assert mode(tmp_path / "store") == 0o700
    assert [n for n in open_to_others(tmp_path / "store") if "/locks/" not in n] == []


def test_sockets_are_private(tmp_path: Path) -> None:
    """Only the gateway's own user may connect to its unix sockets."""
    listener: socket.socket = bind_unix(tmp_path / "gw.sock")
    listener.close()

    assert mode(tmp_path / "gw.sock") == 0o600


def test_what_sandboxes_mount_can_be_read_by_any_user_inside(tmp_path: Path) -> None:
    """An environment's files stay readable, and executable if they were."""
    os.umask(0o077)
    (tmp_path / "env" / "bin").mkdir(parents=True)
    for name, executable in (("bin/tool", True), ("data", False)):
        (tmp_path / "env" / name).write_text("x")
        (tmp_path / "env" / name).chmod(0o700 if executable else 0o600)
    (tmp_path / "env" / "gone").symlink_to("nowhere")
    make_readable_by_sandboxes(tmp_path / "env")

    found = [mode(tmp_path / "env" / name) for name in ("", "bin", "bin/tool", "data")]
    assert found == [0o755, 0o755, 0o755, 0o644]
