"""Each model call that the endpoint was asked for, in a file that outlives a killed endpoint.

The endpoint writes a line when a call arrives and one when it ends; the benchmark reads them.
"""

import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

DELIVERY_S = 0.2
"""Seconds after the engine's last byte for which a turn still counts as in flight: its answer may not
be written down yet."""


@dataclass(frozen=True)
class Moment:
    """When something was killed: from the first signal to the last death."""

    began: float
    ended: float


@dataclass(frozen=True)
class BoughtCall:
    """One call. `session`: the sandbox it came from; empty if the caller named none."""

    session: str
    began: float
    ended: float

    def in_flight(self, at: Moment) -> bool:
        return self.began <= at.ended and self.ended + DELIVERY_S >= at.began


class Ledger:
    """Append-only, so that two endpoints one after the other can write the same file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._numbers = itertools.count(1)

    def begin(self, session: str) -> str:
        """Returns the call's name, for `end`."""
        name = f"{os.getpid()}.{next(self._numbers)}"
        self._write("begin", name, session)
        return name

    def end(self, name: str) -> None:
        self._write("end", name, "")

    def cut(self) -> None:
        """The endpoint died: its calls ended now."""
        self._write("cut", "-", "")

    def clear(self) -> None:
        os.truncate(self._path, 0)

    def close(self) -> None:
        os.close(self._file)

    def calls(self) -> list[BoughtCall]:
        """Since the last `clear`. A call without an end still runs."""
        begun: dict[str, tuple[str, float]] = {}
        found: list[BoughtCall] = []
        for line in self._path.read_text().splitlines():
            what, name, at, session = line.split("\t")
            if what == "begin":
                begun[name] = (session, float(at))
                continue
            for over in (*begun,) if what == "cut" else (name,):
                if over in begun:  # not if it began before the last `clear`
                    found.append(BoughtCall(*begun.pop(over), float(at)))
        return found + [BoughtCall(*call, float("inf")) for call in begun.values()]

    def _write(self, what: str, name: str, session: str) -> None:
        os.write(self._file, f"{what}\t{name}\t{time.monotonic()}\t{session}\n".encode())
