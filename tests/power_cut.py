"""A disk whose power can be cut: ext4 on a loop device."""

import array
import fcntl
import os
import subprocess
from pathlib import Path

import pytest

EXT4_IOC_SHUTDOWN = 0x8004587D
FLUSH_JOURNAL = 1
"""Names that were committed stay. Data that nothing has synced is gone."""


class FragileDisk:
    """Mounted at `path`. Needs root."""

    def __init__(self, folder: Path, megabytes: int = 256) -> None:
        self.path = folder / "disk"
        self.path.mkdir()
        self._image = folder / "disk.img"
        with self._image.open("wb") as file:
            file.truncate(megabytes << 20)
        made = ["mkfs.ext4", "-q", "-F", str(self._image)]
        if os.geteuid() != 0 or not self._run(made) or not self._mount():
            pytest.skip("only root may mount an ext4 image on a loop device")

    def cut_power(self) -> None:
        """As a power cut, and the start after it. Nothing may run on the disk."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, EXT4_IOC_SHUTDOWN, array.array("I", [FLUSH_JOURNAL]), False)
        finally:
            os.close(handle)
        assert self._run(["umount", str(self.path)])
        # A sandbox of another test may have the old file system in its own mount namespace. Then the
        # kernel would mount that one again, still without power.
        after = self._image.with_suffix(".after")
        assert self._run(["cp", "--sparse=always", str(self._image), str(after)])
        self._image.unlink()
        self._image = after.rename(self._image)
        assert self._mount()

    def remove(self) -> None:
        """Its last process may still be about to end."""
        assert self._run(["umount", "--lazy", str(self.path)])

    def _mount(self) -> bool:
        return self._run(["mount", "-o", "loop", str(self._image), str(self.path)])

    def _run(self, argv: list[str]) -> bool:
        try:
            return subprocess.run(argv, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            return False
