"""Connecting: which server is used if no variable names one."""

import os
from pathlib import Path

import pytest
from temporalio.client import Client

from perdure.client.temporal_client import connect
from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_state
from perdure.stack.process_stopping import identify
from perdure.stack.stack_state import StackState


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The addresses of all connection attempts, which are all refused."""
    addresses: list[str] = []

    async def refuse(target_host: str, **_: object) -> Client:
        addresses.append(target_host)
        raise RuntimeError("refused")

    monkeypatch.setattr(Client, "connect", refuse)
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", "/nonexistent/temporal.toml")
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    return addresses


async def test_nothing_said_means_the_local_server(asked: list[str]) -> None:
    """Without an address, variable or profile, the client connects to the server of `perdure
    up`."""
    with pytest.raises(ConfigurationError, match=r"localhost:7233: run `perdure up`"):
        await connect()

    assert asked == ["localhost:7233"]


async def test_the_variable_of_the_temporal_command_counts(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TEMPORAL_ADDRESS decides if no address is given."""
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.internal:7233")
    with pytest.raises(ConfigurationError, match=r"temporal\.internal:7233"):
        await connect()

    assert asked == ["temporal.internal:7233"]


async def test_an_empty_address_joins_no_server_by_chance(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty variable does not select the server that happens to listen on this host."""
    monkeypatch.setenv("TEMPORAL_ADDRESS", "")
    with pytest.raises(ConfigurationError, match=r"TEMPORAL_ADDRESS is empty and nothing runs in"):
        await connect()

    assert asked == []


@pytest.mark.parametrize(("variable", "folder"), [("XDG_CONFIG_HOME", ""), ("HOME", ".config")])
async def test_the_file_of_the_temporal_command_counts(
    asked: list[str],
    variable: str,
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The file is found where Temporal's own tools look for it, without a variable that names
    it."""
    for name in ("TEMPORAL_CONFIG_FILE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / folder / "temporalio" / "temporal.toml"
    file.parent.mkdir(parents=True)
    file.write_text('[profile.default]\naddress = "by-file.internal:7233"\n')
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"by-file\.internal:7233"):
        await connect()

    assert asked == ["by-file.internal:7233"]


def _write_state(home: Path, *, started_later: int = 0) -> None:
    """The state file of a supervisor, whose process is this one."""
    me = identify(os.getpid())
    assert me is not None
    state = StackState(
        status="ready",
        pid=me.pid,
        started=me.started + started_later,
        temporal_address="127.0.0.1:41233",
        namespace="default",
        ui_url="",
        gateway_url="",
        engine="",
    )
    stack_state.write(Settings(home=home), state)


async def test_a_stack_on_other_ports_is_found(asked: list[str], tmp_path: Path) -> None:
    """If the usual port was taken, the SDK connects to the port that this home's stack chose."""
    _write_state(tmp_path)
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:41233"):
        await connect()

    assert asked == ["127.0.0.1:41233"]


async def test_a_stack_that_died_is_not_asked(asked: list[str], tmp_path: Path) -> None:
    """Another process has the supervisor's pid, so the state file is ignored."""
    _write_state(tmp_path, started_later=1)
    with pytest.raises(ConfigurationError):
        await connect()

    assert asked == ["localhost:7233"]
