"""Supervised processes are restarted, found and stopped: real processes, real signals."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.sandboxes.host.host_processes import ProcessId
from perdure.settings.settings_tree import Settings, TemporalSettings
from perdure.stack import stack_ports
from perdure.stack.child_restarts import Child, ChildSpec
from perdure.stack.process_stopping import identify, stop
from perdure.stack.stack_plan import Addresses, Plan
from perdure.stack.stack_supervisor import Supervisor

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


def spawn(program: str) -> "subprocess.Popen[bytes]":
    """A Python process that leads its own group and has printed `up`."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_another_process_with_the_same_pid_is_not_ours() -> None:
    """A pid with another start time is not alive, and is never signalled."""
    ours = identify(os.getpid())
    assert ours is not None
    other = ProcessId(ours.pid, ours.started - 1)

    assert (ours.alive, other.alive, stop(other, 1.0)) == (True, False, False)


def test_process_that_ignores_sigterm_is_killed() -> None:
    """A process that ignores SIGTERM gets SIGKILL, and `stop` returns True."""
    with spawn(STUBBORN) as process:
        identity = identify(process.pid)
        assert identity is not None

        killed = stop(identity, grace_s=0.05)

        assert (killed, process.wait()) == (True, -signal.SIGKILL)


async def until(child: Child, exits: int) -> None:
    """Wait until the child has ended and been restarted `exits` times."""
    while child.state is None or child.state.restarts < exits:
        await asyncio.sleep(0.01)


def child_of(program: str, folder: Path) -> Child:
    spec = ChildSpec("part", (sys.executable, "-c", program), dict(os.environ), grace_s=5.0)
    return Child(spec, folder, lambda: None)


async def test_child_that_dies_is_started_again(tmp_path: Path) -> None:
    """A killed child is restarted with another pid, and its state says how it ended."""
    child = child_of("import signal; signal.pause()", tmp_path)
    await child.start()
    try:
        assert child.state is not None
        first = child.state.process
        os.kill(first.pid, signal.SIGKILL)
        await until(child, 1)
        second = child.state

        assert (first.alive, second.process.alive) == (False, True)
        assert (second.restarts, second.last_exit) == (1, "killed by SIGKILL")
    finally:
        await child.stop()


@pytest.mark.parametrize(("code", "refused"), [(2, True), (1, False)])
async def test_child_that_refuses_its_settings_is_recognised(
    tmp_path: Path, code: int, refused: bool
) -> None:
    """After exit code 2 a child counts as refused: a restart would end the same way."""
    child = child_of(f"raise SystemExit({code})", tmp_path)
    await child.start()
    await until(child, 1)
    await child.stop()

    assert child.refused == refused


async def test_a_part_that_refuses_its_settings_ends_the_start(tmp_path: Path) -> None:
    """The start fails at once with the child's own message, as a configuration error."""
    plan = Plan(Settings(home=tmp_path), tmp_path, Addresses(None, 0, 0, 1, 2))
    supervisor = Supervisor(plan, lambda event: None, [])
    child = child_of("import sys; print('no such tokenizer'); sys.exit(2)", tmp_path)
    supervisor.children["part"] = child
    await child.start()
    try:
        with pytest.raises(ConfigurationError, match="no such tokenizer"):
            await supervisor._answered("part", asyncio.Event().wait(), tries=1_000)
    finally:
        await child.stop()


def test_the_servers_threads_are_the_users_if_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number has a default of ours, which the environment replaces."""
    plan = Plan(Settings(home=tmp_path), tmp_path, Addresses(None, 0, 0, 1, 2))
    monkeypatch.delenv("GOMAXPROCS", raising=False)
    monkeypatch.delenv("GOGC", raising=False)
    default = plan.temporal().env
    monkeypatch.setenv("GOMAXPROCS", "3")

    assert default["GOMAXPROCS"] == str(max(1, (os.cpu_count() or 1) // 2))
    assert default["GOGC"] == "50"
    assert plan.temporal().env["GOMAXPROCS"] == "3"


async def test_stopped_child_stays_down(tmp_path: Path) -> None:
    """A stopped child ends and is not restarted."""
    child = child_of("import signal; signal.pause()", tmp_path)
    await child.start()
    assert child.state is not None

    await child.stop()

    assert (child.state.process.alive, child.exits) == (False, 0)


async def test_the_end_of_the_log_is_read(tmp_path: Path) -> None:
    """The last lines of a child's log can be shown in an error."""
    child = child_of("raise SystemExit('no such port')", tmp_path)
    await child.start()
    await until(child, 1)
    await child.stop()

    assert child.log_end(1) == "no such port"


def test_child_dies_with_its_parent(tmp_path: Path) -> None:
    """After kill -9 of a supervisor its children end."""
    says = tmp_path / "says"
    os.mkfifo(says)
    child = f"import os, signal; open({str(says)!r}, 'w').write(str(os.getpid())); signal.pause()"
    parent = spawn(
        "import asyncio, os, sys; from pathlib import Path\n"
        "from perdure.stack.child_restarts import Child, ChildSpec\n"
        "async def main():\n"
        f"    spec = ChildSpec('c', (sys.executable, '-c', {child!r}), os.environ)\n"
        f"    await Child(spec, Path({str(tmp_path)!r}), lambda: None).start()\n"
        "    await asyncio.sleep(3600)\n"
        "print('up', flush=True); asyncio.run(main())\n"
    )
    watch = os.pidfd_open(int(says.read_text()))

    with parent:
        parent.kill()

    assert signal_of_end(watch), "the child outlived its parent"


def signal_of_end(descriptor: int) -> bool:
    """Whether the process of a pidfd has ended."""
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    try:
        return bool(poll.poll(20_000))
    finally:
        os.close(descriptor)


def test_occupied_port_is_replaced_unless_it_was_set() -> None:
    """An occupied default port is replaced; an occupied port that a user set is an error."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        usual = Settings.model_construct(
            _fields_set=set(), temporal=TemporalSettings.model_construct(set(), ui_port=port)
        )
        chosen = Settings(temporal={"ui_port": port})

        assert stack_ports.choose(usual, "temporal.ui_port") != port
        with pytest.raises(ConfigurationError, match=f"PERDURE_TEMPORAL__UI_PORT={port} is taken"):
            stack_ports.choose(chosen, "temporal.ui_port")


def test_relative_paths_start_in_the_folder_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children run in the checkout's folder, so paths of the caller are made absolute."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tokenizer.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PERDURE_SANDBOX__IMAGE_MAP", "map.json")
    addresses = Addresses(None, 0, 0, gateway_port=1, engine_port=2)

    found = Plan(
        Settings(home=tmp_path, engine={"tokenizer": "model"}), tmp_path, addresses
    ).environment()

    assert found["PERDURE_ENGINE__TOKENIZER"] == str(tmp_path / "model")
    assert found["PERDURE_SANDBOX__IMAGE_MAP"] == str(tmp_path / "map.json")
