"""Whether the host's disk is full. Imports little, because the keeper's memory counts."""

import os

FULL_BYTES = 16 << 20
"""A disk with less than this free is full."""


def is_full(folder: str) -> bool:
    """For this process's user: root may use blocks that others may not."""
    disk = os.statvfs(folder)
    blocks = disk.f_bfree if os.geteuid() == 0 else disk.f_bavail
    return blocks * disk.f_frsize < FULL_BYTES or (disk.f_files > 0 and disk.f_ffree == 0)
