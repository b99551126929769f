"""The Ray cluster that engines run on: the user's, or one node on this host.

Sets up Ray and knows which of its processes are ours, because `ray stop` would end every cluster on
this host.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from perdure.errors import ConfigurationError, MissingDependency
from perdure.installation import command_for_extra
from perdure.serving.engine_commands import NAMESPACE
from perdure.settings import process_environment
from perdure.settings.settings_tree import Settings

LOOPBACK = "127.0.0.1"
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # otherwise Ray uploads and rebuilds the folder each time
    "RAY_AUTH_MODE": "disabled",  # if unset, Ray writes a token, and later starts on this host ask for it
}
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Without this variable, Ray replaces loopback by the host's address and listens on all addresses,
without a key."""
START_S = 120.0
"""Seconds that the local node has to start."""
OBJECT_STORE_BYTES = 80 << 20
"""Ray's minimum; Perdure does not use the object store."""


class Connected(NamedTuple):
    address: str
    dashboard: str
    """URL, or empty."""
    local: bool
    """Whether this is our own node on this host."""


def set_environment() -> None:
    """Call this before Ray is imported. Variables that are already set stay."""
    process_environment.preset(ENVIRONMENT)


def connect(
    settings: Settings,
    address: str = "",
    *,
    start: bool = True,
    runtime_env: dict[str, Any] | None = None,
) -> Connected:
    """Connect to a Ray cluster.

    `address`: the cluster's; empty = RAY_ADDRESS, otherwise our own node, started if necessary.
    `runtime_env`: files that Ray copies to the nodes for actors of this connection.

    Raises: MissingDependency; ConfigurationError if there is no cluster or it cannot be reached.
    """
    given = address or process_environment.foreign("RAY_ADDRESS")
    set_environment()
    if not given:
        process_environment.force(LOOPBACK_ONLY)  # read when Ray is imported
    try:
        import ray
    except ImportError:
        raise MissingDependency(
            f"Ray is not installed: install it with `{command_for_extra('serving')}`"
        ) from None
    found = given or _running(settings) or (start_local(settings) if start else "")
    if not found:
        raise ConfigurationError(
            "no Ray cluster: start one with `perdure engines up --model M`, or set RAY_ADDRESS"
        )
    try:
        context = ray.init(
            address=found,
            namespace=NAMESPACE,
            runtime_env=runtime_env,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (ConnectionError, TimeoutError, RuntimeError) as error:
        said = str(error).splitlines()[0]
        raise ConfigurationError(f"the Ray cluster at {found} cannot be used: {said}") from error
    if not given and (state := _state(settings)) is not None:
        return Connected(found, str(state["dashboard"]), True)
    dashboard = context.dashboard_url
    return Connected(found, f"http://{dashboard}" if dashboard else "", False)


def start_local(settings: Settings) -> str:
    """Start one Ray node on loopback and return its address. `stop_local` ends it."""
    folder = settings.home.absolute()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    port, dashboard_port, log = _free_port(), _free_port(), folder / "logs" / "ray.log"
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    words += ["--node-ip-address", LOOPBACK, "--port", str(port), "--disable-usage-stats"]
    words += ["--include-dashboard", "true", "--dashboard-host", LOOPBACK]
    words += [
        "--dashboard-port",
        str(dashboard_port),
        "--object-store-memory",
        str(OBJECT_STORE_BYTES),
    ]
    with log.open("ab") as file:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**process_environment.variables(), **ENVIRONMENT, **LOOPBACK_ONLY},
        )
    address = f"{LOOPBACK}:{port}"
    end = time.monotonic() + START_S
    while not _listens(port):
        if child.poll() is not None or time.monotonic() > end:
            raise ConfigurationError(f"Ray did not start: see {log}")
        time.sleep(0.1)
    path = _state_file(settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "address": address,
        "dashboard": f"http://{LOOPBACK}:{dashboard_port}",
        "pid": child.pid,
        "started": _started(child.pid),
    }
    path.write_text(json.dumps(facts))
    return address


def stop_local(settings: Settings) -> bool:
    """End the node that `start_local` started, and no other. False: there was none."""
    state = _state(settings)
    if state is None:
        return False
    ours = process_tree(state["pid"])
    _send([state["pid"]], signal.SIGTERM)  # `ray start --block` ends what it started
    end = time.monotonic() + 20.0
    while any(_alive(pid, born) for pid, born in ours.items()) and time.monotonic() < end:
        time.sleep(0.1)
    _send([pid for pid, born in ours.items() if _alive(pid, born)], signal.SIGKILL)
    _state_file(settings).unlink(missing_ok=True)
    return True


def _running(settings: Settings) -> str:
    state = _state(settings)
    return str(state["address"]) if state else ""


def _state(settings: Settings) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads(_state_file(settings).read_text())
    except (OSError, ValueError):
        return None
    return state if _alive(state["pid"], state["started"]) else None


def _state_file(settings: Settings) -> Path:
    return settings.home.absolute() / "run" / "ray.json"


def process_tree(root: int) -> dict[int, int]:
    """The process and all its descendants, with their start times."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        parents[int(path.name)] = int(fields[1])
    found, frontier = {root}, [root]
    while frontier:
        parent = frontier.pop()
        below = [pid for pid, above in parents.items() if above == parent and pid not in found]
        found.update(below)
        frontier += below
    return {pid: born for pid in found if (born := _started(pid)) is not None}


def _alive(pid: int, born: int | None) -> bool:
    return born is not None and _started(pid) == born


def _started(pid: int) -> int | None:
    """Start time in clock ticks; None if there is no such process or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0
