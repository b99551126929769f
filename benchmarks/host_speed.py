"""Measures the host's current speed: CPU ms of a fixed piece of pure Python, during a measurement.

A virtual core is almost twice as fast while the other one on its physical core is idle. So milliseconds
of two runs cannot be compared, but multiples of the yardstick in the same run can.

    python -m benchmarks.host_speed      # prints a line twice a second until it is killed
"""

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import time
import tokenize
from collections.abc import Iterator
from pathlib import Path

EVERY_S = 0.5
SOURCE = Path(argparse.__file__).read_text()


def measure() -> float:
    """CPU ms that the standard library takes to tokenize the source of its own `argparse`."""
    started = time.thread_time()
    for _ in tokenize.generate_tokens(io.StringIO(SOURCE).readline):
        pass
    return (time.thread_time() - started) * 1e3


class HostSpeedProbe:
    """The output of a process that runs next to the measured ones."""

    def __init__(self, written: Path) -> None:
        self._written = written

    def mark(self) -> int:
        return len(self._written.read_text().splitlines())

    def since(self, mark: int) -> float:
        """The median since `mark`. Raises: StatisticsError if nothing was measured."""
        return statistics.median(map(float, self._written.read_text().splitlines()[mark:]))


@contextlib.contextmanager
def beside(written: Path) -> Iterator[HostSpeedProbe]:
    with written.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.host_speed"], stdout=file)
    try:
        yield HostSpeedProbe(written)
    finally:
        process.kill()
        process.wait()


def main() -> None:
    while True:
        print(measure(), flush=True)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
