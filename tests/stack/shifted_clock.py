"""The wall clock of a stack's processes, moved by libfaketime. Temporal's server keeps the true time."""

import os
from pathlib import Path

import pytest

LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
MISSING = "" if LIBRARY else "libfaketime is missing: apt-get install faketime"
TWO_HOURS = 7200


class Clock:
    """Made before a stack starts, because its processes take the library from our environment."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._file = folder / "clock"
        self.ahead_s = 0
        self.jump(0)
        faked = {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            # As for a real jump: times of files stay, and so does the monotonic clock.
            "NO_FAKE_STAT": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
            # Else each timed wait of a thread costs the library some 20 ms of CPU.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }
        for name, value in faked.items():
            patch.setenv(name, value)

    def jump(self, ahead_s: int) -> None:
        """From now on it is so many seconds ahead of the true time."""
        draft = self._file.with_suffix(".draft")
        draft.write_text(f"{ahead_s:+d}\n")
        os.replace(draft, self._file)
        self.ahead_s = ahead_s
