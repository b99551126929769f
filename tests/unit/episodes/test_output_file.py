"""Output files that a user names."""

import os
from pathlib import Path

import pytest

from perdure.episodes.output_file import output_file
from perdure.errors import ConfigurationError


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    """As a shell's redirection does."""
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")

    with output_file(tmp_path / "link") as file:
        file.write(b"new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


@pytest.mark.parametrize("kind", ["folder", "fifo", "device"])
def test_what_is_no_file_is_refused_and_stays(tmp_path: Path, kind: str) -> None:
    """Replacing a device or a FIFO with a file would break other programs."""
    path = tmp_path / "out"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path = Path("/dev/null")
    before = path.stat()

    def write() -> None:
        with output_file(path) as file:
            file.write(b"x")

    with pytest.raises(ConfigurationError, match=f"{path} is a .*name a file, or `-`"):
        write()

    assert (path.stat().st_mode, path.stat().st_ino) == (before.st_mode, before.st_ino)


def test_a_write_that_breaks_leaves_the_old_file(tmp_path: Path) -> None:
    """The file is written whole or not at all; no draft is left."""
    (tmp_path / "out").write_text("old")

    def write() -> None:
        with output_file(tmp_path / "out") as file:
            file.write(b"half")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        write()

    assert [one.name for one in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "old"


def test_a_dash_is_standard_output(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """An export can be piped, and no file of that name appears."""
    with output_file(Path("-")) as file:
        file.write(b"\xffline")

    assert capfdbinary.readouterr().out == b"\xffline"
    assert not Path("-").exists()
