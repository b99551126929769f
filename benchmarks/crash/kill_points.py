"""Kills parts of a job once a given share of its model calls was made."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.call_log import KillWindow
from benchmarks.crash.crash_outcome import Crash, Kill
from benchmarks.model_endpoint import Endpoint

LIMIT_S = 300.0
SETTLE_S = 5.0
"""Seconds that each side has to clean up before we count leaks."""
PAUSE_S = 0.02


class Acts:
    """The same kills for every side. `runner`: the job's own process, which must outlive them."""

    def __init__(self, crash: Crash, endpoint: Endpoint, runner: "subprocess.Popen[bytes]") -> None:
        self._crash = crash
        self._endpoint = endpoint
        self._runner = runner
        self.done: list[Kill] = []

    def kill_engine(self) -> None:
        """Kill the engine during its calls and restart it at once."""
        self._wait_for(self._crash.engine_at)
        self._record("engine", self._endpoint.kill)
        self._endpoint.start_again()

    def kill_sandboxes(self, kill: Callable[[int], tuple[str, ...]]) -> None:
        """`kill` kills that many sandboxes and returns their sessions."""
        self._wait_for(self._crash.sandboxes_at)
        began = time.monotonic()
        sessions = kill(self._crash.sandboxes)
        moment = KillWindow(began, time.monotonic())
        self.done.append(Kill(f"{self._crash.sandboxes} sandboxes", moment, sessions))

    def kill_everything(self, kill: Callable[[], None]) -> None:
        self._wait_for(self._crash.everything_at)
        self._record("everything", kill)

    def in_flight(self) -> dict[str, int]:
        calls = self._endpoint.bought()
        agents = self._crash.workers
        return {act.what: act.in_flight(calls, agents) for act in self.done}

    def _record(self, what: str, kill: Callable[[], None]) -> None:
        began = time.monotonic()
        kill()
        self.done.append(Kill(what, KillWindow(began, time.monotonic())))

    def _wait_for(self, share: float) -> None:
        """Wait until that share of the calls has begun. Raises: RuntimeError if the runner ends first."""
        deadline = time.monotonic() + LIMIT_S
        while (calls := len(self._endpoint.bought())) < share * self._crash.ideal_calls:
            if self._runner.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"only {calls} calls were made before the run ended")
            time.sleep(PAUSE_S)


def mounts_below(folder: Path) -> int:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return sum(line.split()[1].startswith(str(folder)) for line in lines)
