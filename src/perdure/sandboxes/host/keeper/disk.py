"""A full disk of the host: whether it is, and how a keeper tells of it. Imports little, because the
keeper's memory counts."""

import os

FULL_BYTES = 16 << 20
"""A disk with less than this free is full."""
GIVEN_UP = 0o400
"""Mode of the `pid` file of a command that its keeper could not start. A full disk takes no words."""


def is_full(folder: str) -> bool:
    """For this process's user: root may use blocks that others may not."""
    disk = os.statvfs(folder)
    blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail
    return blocks * disk.f_frsize < FULL_BYTES or (disk.f_files > 0 and disk.f_ffree == 0)


def give_up(record: int) -> None:
    """Say in a command's open `pid` file that it will never run, and close it."""
    os.fchmod(record, GIVEN_UP)
    os.close(record)
