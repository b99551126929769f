"""Detects a full disk of the host, and marks a command that could not start because of it. Imports
little, because the keeper's memory counts."""

import os

FULL_BYTES = 16 << 20
"""A disk with less than this free is full."""
GIVEN_UP = 0o400
"""Mode of the `pid` file of a command that its keeper could not start. A full disk takes a mode,
but no text."""


def is_full(folder: str) -> bool:
    """Whether it is full for this process's user: root may use blocks that others may not."""
    disk = os.statvfs(folder)
    blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail
    return blocks * disk.f_frsize < FULL_BYTES or (disk.f_files > 0 and disk.f_ffree == 0)


def give_up(record: int) -> None:
    """Mark in a command's open `pid` file that it will never run, and close the file."""
    os.fchmod(record, GIVEN_UP)
    os.close(record)
