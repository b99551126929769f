"""Connecting: which server is meant when nobody says."""

import pytest
from temporalio.client import Client

from perdure.client.connection import connect
from perdure.errors import ConfigurationError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were connected to; each of them refuses."""
    addresses: list[str] = []

    async def refuse(target_host: str, **_: object) -> Client:
        addresses.append(target_host)
        raise RuntimeError("refused")

    monkeypatch.setattr(Client, "connect", refuse)
    for name in ("TEMPORAL_ADDRESS", "TEMPORAL_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", "/nonexistent/temporal.toml")
    return addresses


async def test_nothing_said_means_the_local_server(asked: list[str]) -> None:
    """Without an address, variable or profile, the server that `perdure up` starts is asked."""
    with pytest.raises(ConfigurationError, match=r"localhost:7233: run `perdure up`"):
        await connect()

    assert asked == ["localhost:7233"]


async def test_the_variable_of_the_temporal_command_counts(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TEMPORAL_ADDRESS decides where an address is not given."""
    monkeypatch.setenv("TEMPORAL_ADDRESS", "temporal.internal:7233")
    with pytest.raises(ConfigurationError, match=r"temporal\.internal:7233"):
        await connect()

    assert asked == ["temporal.internal:7233"]
