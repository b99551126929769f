"""A benchmark that is stopped leaves none of its processes behind."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys
from pathlib import Path
from benchmarks.cpu_measurement import Meter
from benchmarks.scratch_folder import scratch_folder

signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background inherit none
told = Path(sys.argv[1])
says = "import os, sys, time; os.write(1, b'%d' % os.getpid()); time.sleep(600)"
with scratch_folder("pd-", keep=False) as folder, Meter.open("interrupted", folder) as meter:
    meter.run([sys.executable, "-c", says], told)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_what_a_benchmark_runs_ends_with_it(tmp_path: Path, signum: int) -> None:
    """Ctrl-C and SIGTERM that only the benchmark gets end the command that it waits for."""
    told = tmp_path / "pid"
    benchmark = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(told)], stderr=subprocess.DEVNULL, text=True
    )
    while not told.exists() or not told.read_text():
        assert benchmark.poll() is None
    command = os.pidfd_open(int(told.read_text()))

    try:
        benchmark.send_signal(signum)
        benchmark.wait(60)
        assert select.select([command], [], [], 60)[0], "it still runs"
    finally:
        benchmark.kill()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(command, signal.SIGKILL)
        os.close(command)
