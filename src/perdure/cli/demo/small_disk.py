"""A small file system of the demo's own, which it may fill to the last byte.

It is a tmpfs in the mount namespace of a process of its own. Other processes reach it through
`/proc/<pid>/root`. It is gone when that process ends, which happens when this one ends, even by kill -9.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from perdure.errors import MissingDependency

MOUNT_POINT = "small-disk"
SIZE_MB = 32
BALLAST = "ballast"
PIECE = 1 << 16


class SmallDisk:
    """`path`: the folder where the file system is mounted, for every process of this user."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Leave no free byte."""
        with contextlib.suppress(OSError), (self.path / BALLAST).open("wb", buffering=0) as file:
            while file.write(bytes(PIECE)):
                pass

    def make_room(self) -> None:
        (self.path / BALLAST).unlink()


@contextlib.asynccontextmanager
async def mounted(folder: Path) -> AsyncIterator[SmallDisk]:
    """Mount it on `folder`, which is created and removed.

    Raises: MissingDependency if this user may not mount a file system, with the reason.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        process = await asyncio.create_subprocess_exec(
            *_command(folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        if not await process.stdout.readline():
            reason = (await process.stderr.read()).decode("utf-8", "replace").strip()
            await process.wait()
            raise MissingDependency(reason.rpartition("\n")[2])
        try:
            yield SmallDisk(Path(f"/proc/{process.pid}/root{folder}"))
        finally:
            process.stdin.close()
            await process.wait()
    finally:
        folder.rmdir()


def _command(folder: Path) -> list[str]:
    """The command that mounts it, prints a line, and ends when its standard input closes."""
    if not (unshare := shutil.which("unshare")):
        raise MissingDependency("`unshare` is not installed (package util-linux)")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    mount = (
        f'mount -t tmpfs -o size={SIZE_MB}m,mode=700 perdure-demo "$0" && echo mounted && exec cat'
    )
    return [unshare, *user, "--mount", "sh", "-c", mount, str(folder)]
