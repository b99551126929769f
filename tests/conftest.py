"""How the quick suites run side by side, and the Temporal server that the tests of a process share.

Most tests wait for another process. So several pytest processes share few cores, and each takes a
whole file at a time: what the tests of a file share, such as a stack, starts once. The tests of the
files in `SPREAD` share nothing, so any process takes any of them. `-n 0` runs all tests one after
the other, in one process.
"""

import faulthandler
import functools
import gc
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from uuid import uuid4

import pytest
from _pytest.capture import CaptureManager
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from temporalio.client import Client

    from tests.workflows.dev_server import SharedServer

# Without bytecode files each of some hundred processes would compile everything that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest.register_assert_rewrite("perdure.testing")  # so that a contract that fails shows the values

SIDE_BY_SIDE = ("unit", "contracts", "workflows", "integration")
"""Suites whose files do not disturb each other. The other suites measure, or kill what they find."""
PER_CORE = 4
PER_CORE_UNIT = 2
"""For the unit tests alone, which wait less: starting a process takes three seconds."""
SPREAD = (
    "tests/contracts/test_bubblewrap.py",
    "tests/contracts/test_daytona_contract.py",
    "tests/contracts/test_e2b_contract.py",
    "tests/contracts/test_grader_contract.py",
    "tests/contracts/test_kubernetes_contract.py",
    "tests/contracts/test_kubernetes_faults.py",
    "tests/contracts/test_modal_contract.py",
    "tests/contracts/test_relays.py",
    "tests/contracts/test_sandbox_contract.py",
    "tests/contracts/test_service_faults.py",
    "tests/unit/gateway/test_fuzz.py",
    "tests/unit/gateway/test_gateway.py",
    "tests/workflows/test_group_and_run.py",
    "tests/workflows/test_rollout.py",
)
"""Files that last long and whose tests share nothing."""
PACKAGES = re.compile(r"apt-get install ([a-z0-9.+-]+(?: (?!on )[a-z0-9.+-]+)*)")
"""What the reason of a skipped test says to install."""
GRACE_S = 60
"""For a test that met its time limit to fail and tidy up."""


@runtime_checkable
class HasLogs(Protocol):
    """A stack of real processes."""

    def last_words(self) -> str: ...


class Spreading(LoadFileScheduling):  # type: ignore[misc]  # xdist ships no types
    """Gives each process a file at a time, and single tests of the files in `SPREAD`."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if nodeid.startswith(SPREAD) else nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported here lives to the end: looking for garbage in it is a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that outlives its limit ends its process, with the stacks of all threads.

    The limit itself is an exception in the main thread: an event loop may take it for that of a
    callback, and what tidies up after it may wait for ever.
    """
    guard = threading.Timer(_limit_s(item) + GRACE_S, _end_process, (item,))
    guard.daemon = True
    guard.start()
    try:
        return (yield)
    finally:
        guard.cancel()


def _limit_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return float(marker.args[0])
    return float(item.config.getoption("timeout") or item.config.getini("timeout"))


class Overdue:
    """In the process that hands tests out: ends those that run them if one of them is long overdue.

    A process that is stopped, or that waits in the kernel, cannot end itself.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._guards: dict[str, threading.Timer] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        guard = threading.Timer(self._limit_s, self._end, (nodeid,))
        guard.daemon = True
        self._guards[nodeid] = guard
        guard.start()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if guard := self._guards.pop(nodeid, None):
            guard.cancel()

    def _end(self, nodeid: str) -> None:
        print(f"\n{nodeid} does not end. Processes:", file=sys.__stderr__, flush=True)
        for pid in map(
            int, Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
        ):
            state = (
                Path(f"/proc/{pid}/status").read_text().split("State:")[1].splitlines()[0].strip()
            )
            where = Path(f"/proc/{pid}/wchan").read_text()
            print(f"{pid}: {state}, in {where}", file=sys.__stderr__, flush=True)
            os.kill(pid, signal.SIGKILL)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        limit_s = float(config.getoption("timeout") or config.getini("timeout"))
        config.pluginmanager.register(Overdue(limit_s + 2 * GRACE_S))


def _end_process(item: pytest.Item) -> None:
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if isinstance(capture, CaptureManager):
        capture.suspend_global_capture()
    print(f"{item.nodeid} does not end:", file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2)
    os._exit(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test that has a stack shows how the logs of its processes end."""
    report = yield
    if report.failed and isinstance(stack := getattr(item, "funcargs", {}).get("stack"), HasLogs):
        report.sections.append(("logs of the stack", stack.last_words()))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line names all Debian packages without which tests were skipped."""
    reasons = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    wanted = [found[1].split() for reason in reasons if (found := PACKAGES.search(reason))]
    if wanted:
        packages = " ".join(sorted({package for one in wanted for package in one}))
        terminalreporter.write_line(
            f"{len(wanted)} tests were skipped because a program is missing: "
            f"apt-get install {packages}"
        )


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return Spreading(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes for `-n auto`: none for a single file, so that it starts at once."""
    paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    suites = [Path(__file__).parent / suite for suite in SIDE_BY_SIDE]
    if not all(any(path.is_relative_to(suite) for suite in suites) for path in paths):
        return 0
    if len(paths) == 1 and paths[0].is_file():
        return 0
    unit = all(path.is_relative_to(suites[SIDE_BY_SIDE.index("unit")]) for path in paths)
    return (PER_CORE_UNIT if unit else PER_CORE) * (os.cpu_count() or 1)


@pytest.fixture(scope="session", autouse=True)
def _authorities_are_read_once() -> None:
    """Each httpx client reads all certificate authorities, which takes 20 ms; tests make thousands.

    Clients with the same settings share the TLS context that the first of them made.
    """
    default: Any = importlib.import_module("httpx._transports.default")
    create = default.create_ssl_context

    @functools.cache
    def shared(trust_env: bool, *_: str | None) -> Any:
        return create(trust_env=trust_env)

    def context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
        if verify is not True or cert is not None:
            return create(verify, cert, trust_env)
        return shared(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

    default.create_ssl_context = context


@pytest.fixture(scope="session")
def server() -> "Iterator[SharedServer]":
    """The Temporal dev server of this process, for all tests that need no server of their own."""
    from tests.workflows.dev_server import SharedServer

    server = SharedServer()
    yield server
    server.stop()


@pytest.fixture
async def client(server: "SharedServer", monkeypatch: pytest.MonkeyPatch) -> "Client":
    """Each test has a namespace of its own: no state of another test to trip over."""
    namespace = f"test-{uuid4().hex}"
    monkeypatch.setenv("TEMPORAL_NAMESPACE", namespace)  # for code that connects by itself
    return await server.client_of_new(namespace)
