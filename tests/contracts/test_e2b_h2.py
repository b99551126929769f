"""E2B over TLS and HTTP/2, as in production: the real SDK against the double."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.sandboxes.base import Exec, SandboxSpec
from perdure.sandboxes.providers.e2b.provider import E2BProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Limits
from tests.certificates import Authority
from tests.doubles.http2_proxy import behind_http2
from tests.service_harness import E2B, serving

pytest.importorskip("e2b")

ID = "p-h2-agent-1"
SPEC = SandboxSpec("/testbed", limits=Limits(output_mb=1), ttl_s=300)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One certificate for all tests: the SDK reads the file once."""
    return Authority.of(tmp_path_factory.mktemp("authority"))


@pytest.fixture
async def server(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[object]:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    for kept in ("_transports", "_pools", "_httpx_transports"):
        # made by earlier tests, which trust other certificates
        monkeypatch.setattr(f"e2b.api.client_async.{kept}", {})
    async with (
        serving(E2B, tmp_path / "server", monkeypatch) as (server, plain),
        behind_http2(plain, authority.tls()) as url,
    ):
        for name, value in E2B.variables(url, server.state).items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def provider(tmp_path: Path, server: object) -> E2BProvider:
    provider = E2BProvider(Settings(home=tmp_path / "home"))
    provider.request_s = 20.0
    return provider


async def test_commands_and_files_over_h2(provider: E2BProvider) -> None:
    """Sixteen commands at once on one connection, and a file larger than every window."""
    data = bytes(range(256)) * 8000
    async with await provider.create(SPEC, ID) as box:
        results = await asyncio.gather(*(box.exec(f"echo {n}") for n in range(16)))
        await box.put("big", data)
        back = await box.get("big")

    assert [r.stdout for r in results] == [b"%d\n" % n for n in range(16)]
    assert back == data


@pytest.mark.parametrize("when", ["before", "after"])
async def test_server_that_goes_away_costs_nothing(
    provider: E2BProvider, server: object, when: str
) -> None:
    """After a GOAWAY at any call, handled or not, there is one sandbox, one run, one whole file."""
    faults = server.faults  # type: ignore[attr-defined]
    faults.add([{"match": "POST /v2/sandboxes$", "goaway": True, "when": when}])
    async with await provider.create(SPEC, ID) as box:
        for match in ("/process", "POST /files", "DELETE"):
            faults.add([{"match": match, "goaway": True, "when": when}])
        await box.start("once", Exec(["bash", "-c", "echo ran >>count"]))
        await box.wait("once", 60)
        await box.put("big", b"x" * 200_000)
        seen = (await box.exec("cat count; stat -c %s big")).stdout
        made = len(server.sandboxes.all())  # type: ignore[attr-defined]

    assert (seen, made) == (b"ran\n200000\n", 1)
    assert all(rule.hits for rule in faults.rules)
    assert server.sandboxes.all() == []  # type: ignore[attr-defined]
