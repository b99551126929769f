"""Samples CPU, idle CPU of the host, and memory while a batch runs."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cpu_measurement import TICKS, Memory, Meter

EVERY_S = 1.0
MEMORY_EVERY = 30
"""CPU samples per memory sample, which is slow: it reads the page tables of all processes."""


@dataclass(frozen=True)
class Sample:
    """`at`: seconds since the epoch. `cpu`: CPU of the batch so far. `idle`: idle time of all cores since boot."""

    at: float
    cpu: float
    idle: float


@dataclass
class Sampler:
    """Reads a meter in its own thread."""

    meter: Meter
    samples: list[Sample] = field(default_factory=list)
    memory: float = 0.0
    """The peak memory of all processes together, in MB."""

    @contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()
        thread = threading.Thread(target=self._sample_until, args=(ended,))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def cores(self, since: float, until: float) -> float:
        """CPU seconds per second between two moments."""
        first, last = self._nearest(since), self._nearest(until)
        return (last.cpu - first.cpu) / (last.at - first.at)

    def idle(self, since: float, until: float) -> float:
        """Idle share of the host's CPU, 0 to 1."""
        first, last = self._nearest(since), self._nearest(until)
        return (last.idle - first.idle) / (last.at - first.at) / (os.cpu_count() or 1)

    def _nearest(self, moment: float) -> Sample:
        return min(self.samples, key=lambda sample: abs(sample.at - moment))

    def _sample_until(self, ended: threading.Event) -> None:
        while True:
            self.samples.append(Sample(time.time(), self.meter.seconds(), idle_seconds()))
            if len(self.samples) % MEMORY_EVERY == 0:
                self.memory = max(self.memory, Memory.of(self.meter.pids()).pss)
            if ended.wait(EVERY_S):
                return


def idle_seconds() -> float:
    """Idle time of all cores since boot."""
    return int(Path("/proc/stat").read_text().split(maxsplit=5)[4]) / TICKS
