"""Records each model call at the endpoint in a file that survives a killed endpoint.

The endpoint writes a line when a call arrives and one when it ends. The benchmark reads them.
"""

import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path

DELIVERY_S = 0.2
"""A turn counts as in flight for this many seconds after the engine's last byte: its answer may not be
stored yet."""


@dataclass(frozen=True)
class KillWindow:
    """The time of a kill, from the first signal to the last death."""

    began: float
    ended: float


@dataclass(frozen=True)
class EndpointCall:
    """One call. `session`: the sandbox that it came from; empty if the caller named none."""

    session: str
    began: float
    ended: float

    def in_flight(self, at: KillWindow) -> bool:
        return self.began <= at.ended and self.ended + DELIVERY_S >= at.began


class CallLog:
    """An append-only file, so that a restarted endpoint can continue it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._numbers = itertools.count(1)

    def begin(self, session: str) -> str:
        """Record the begin of a call; return its name for `end`."""
        name = f"{os.getpid()}.{next(self._numbers)}"
        self._write("begin", name, session)
        return name

    def end(self, name: str) -> None:
        self._write("end", name, "")

    def cut(self) -> None:
        """Record that the endpoint died, which ended all its calls."""
        self._write("cut", "-", "")

    def clear(self) -> None:
        os.truncate(self._path, 0)

    def close(self) -> None:
        os.close(self._file)

    def calls(self) -> list[EndpointCall]:
        """All calls since the last `clear`. A call without an end still runs."""
        begun: dict[str, tuple[str, float]] = {}
        found: list[EndpointCall] = []
        for line in self._path.read_text().splitlines():
            what, name, at, session = line.split("\t")
            if what == "begin":
                begun[name] = (session, float(at))
                continue
            for over in (*begun,) if what == "cut" else (name,):
                if over in begun:  # false if it began before the last `clear`
                    found.append(EndpointCall(*begun.pop(over), float(at)))
        return found + [EndpointCall(*call, float("inf")) for call in begun.values()]

    def _write(self, what: str, name: str, session: str) -> None:
        os.write(self._file, f"{what}\t{name}\t{time.monotonic()}\t{session}\n".encode())
