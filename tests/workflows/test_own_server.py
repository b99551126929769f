"""A Temporal server as operators run it: mTLS, API keys, address forms of Temporal Cloud.

The server is real. A proxy adds what a dev server lacks, such as TLS (`tests/temporal_proxy.py`).
"""

import ssl
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client

from perdure.client.sdk import Perdure
from perdure.client.temporal_client import connect
from perdure.client.temporal_server import configured_address, configured_server
from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings
from perdure.types import RolloutRequest, RolloutStatus
from tests.certificates import Authority, Issued, issue
from tests.temporal_proxy import TemporalProxy, proxied
from tests.workflows.scripted_stages import Stages

pytestmark = pytest.mark.temporal

NAME = "temporal.example"
KEY = "a-key-of-an-operator"
REQUEST = RolloutRequest(run_id="own", instance="toy/add-1", agent="nop")


@pytest.fixture(autouse=True)
def _only_what_a_test_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", "/nonexistent/temporal.toml")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.of(tmp_path)


@pytest.fixture
def ours(authority: Authority, tmp_path: Path) -> Issued:
    """The certificate of a worker."""
    return issue(tmp_path, "worker", "DNS:worker.example")


def _server_side(authority: Authority, certificate: Issued | None = None) -> ssl.SSLContext:
    """A server that requires client certificates of the test's authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own = certificate or Issued(authority.certificate, authority.key)
    context.load_cert_chain(own.certificate, own.key)
    context.load_verify_locations(authority.file)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _address(client: Client) -> str:
    return client.service_client.config.target_host


def _settings(tmp_path: Path, proxy: TemporalProxy, **temporal: Any) -> Settings:
    return Settings(home=tmp_path / "home", temporal={"address": proxy.address, **temporal})


def _mtls(authority: Authority, ours: Issued) -> dict[str, Any]:
    return {
        "tls_ca_file": authority.file,
        "tls_cert_file": ours.certificate,
        "tls_key_file": ours.key,
    }


async def test_a_rollout_runs_over_mutual_tls(
    client: Client, authority: Authority, ours: Issued, tmp_path: Path
) -> None:
    """Client and workers reach a server that requires certificates, through settings only."""
    async with proxied(_address(client), _server_side(authority)) as proxy:
        settings = _settings(tmp_path, proxy, **_mtls(authority, ours))
        through = await connect(settings=settings)
        async with Stages().at_work(through):
            episode = await (await Perdure(through).start_rollout(REQUEST)).result()

    assert (episode.status, proxy.connections > 0) == (RolloutStatus.GRADED, True)


async def test_the_name_in_the_certificate_may_differ_from_the_address(
    client: Client, authority: Authority, ours: Issued, tmp_path: Path
) -> None:
    """A server behind another address is verified by the name in the settings."""
    named = issue(tmp_path, "server", f"DNS:{NAME}")
    async with proxied(_address(client), _server_side(authority, named)) as proxy:
        keys = _mtls(authority, ours)
        with pytest.raises(ConfigurationError, match="no Temporal server answers"):
            await connect(settings=_settings(tmp_path, proxy, **keys))
        found = await connect(settings=_settings(tmp_path, proxy, **keys, tls_server_name=NAME))

        assert await found.service_client.check_health()


@pytest.mark.parametrize("lacks", ["certificate", "authority", "all"])
async def test_without_its_certificates_nothing_connects(
    client: Client, authority: Authority, ours: Issued, tmp_path: Path, lacks: str
) -> None:
    """A worker without a certificate, or without the authority, gets an error and never uses plain
    text."""
    keys = _mtls(authority, ours)
    for name in {
        "certificate": ("tls_cert_file", "tls_key_file"),
        "authority": ("tls_ca_file",),
        "all": tuple(keys),
    }[lacks]:
        del keys[name]
    async with proxied(_address(client), _server_side(authority)) as proxy:
        with pytest.raises(ConfigurationError, match="no Temporal server answers"):
            await connect(settings=_settings(tmp_path, proxy, **keys))


async def test_the_variables_of_the_temporal_command_do_the_same(
    client: Client,
    authority: Authority,
    ours: Issued,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TEMPORAL_ADDRESS and TEMPORAL_TLS_* connect without a Perdure setting."""
    async with proxied(_address(client), _server_side(authority)) as proxy:
        monkeypatch.setenv("TEMPORAL_ADDRESS", proxy.address)
        monkeypatch.setenv("TEMPORAL_TLS_SERVER_CA_CERT_PATH", str(authority.file))
        monkeypatch.setenv("TEMPORAL_TLS_CLIENT_CERT_PATH", str(ours.certificate))
        monkeypatch.setenv("TEMPORAL_TLS_CLIENT_KEY_PATH", str(ours.key))
        found = await connect(settings=Settings(home=tmp_path))

        assert await found.service_client.check_health()


async def test_a_profile_of_the_temporal_command_does_the_same(
    client: Client,
    authority: Authority,
    ours: Issued,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A profile in Temporal's TOML file connects, and a Perdure setting overrides one of its
    fields."""
    async with proxied(_address(client), _server_side(authority)) as proxy:
        file = tmp_path / "temporal.toml"
        file.write_text(
            f"""[profile.prod]
address = "{proxy.address}"
[profile.prod.tls]
server_ca_cert_path = "{authority.file}"
client_cert_path = "{ours.certificate}"
client_key_path = "/nonexistent"
"""
        )
        monkeypatch.setenv("TEMPORAL_CONFIG_FILE", str(file))
        monkeypatch.setenv("TEMPORAL_PROFILE", "prod")
        settings = Settings(home=tmp_path, temporal={"tls_key_file": ours.key})
        found = await connect(settings=settings)

        assert await found.service_client.check_health()
        with pytest.raises(ConfigurationError, match="cannot read /nonexistent"):
            await connect(settings=Settings(home=tmp_path))


async def test_every_call_sends_the_api_key(
    client: Client, authority: Authority, tmp_path: Path
) -> None:
    """A server that requires an API key gets it with every call of client and workers, over TLS."""
    async with proxied(_address(client), authority.tls(), api_key=KEY) as proxy:
        settings = _settings(tmp_path, proxy, api_key=KEY, tls_ca_file=authority.file)
        through = await connect(settings=settings)
        async with Stages().at_work(through):
            episode = await (await Perdure(through).start_rollout(REQUEST)).result()

    called = {headers[":path"].rpartition("/")[2] for headers in proxy.calls}
    assert episode.status is RolloutStatus.GRADED
    assert {"StartWorkflowExecution", "PollActivityTaskQueue"} <= called


async def test_a_wrong_api_key_is_refused_and_not_shown(
    client: Client, authority: Authority, tmp_path: Path
) -> None:
    """The error names the server, and no part of the key."""
    async with proxied(_address(client), authority.tls(), api_key=KEY) as proxy:
        settings = _settings(tmp_path, proxy, api_key="wrong-key", tls_ca_file=authority.file)
        with pytest.raises(ConfigurationError, match=proxy.address) as refused:
            await connect(settings=settings)

    assert "wrong-key" not in str(refused.value) + repr(settings) + repr(
        configured_server(settings)
    )


CLOUD = "orders.a1b2c.tmprl.cloud"
REGION = "us-east-1.aws.api.temporal.io:7233"


def _cloud(**temporal: Any) -> Any:
    return configured_server(Settings(temporal=temporal))


@pytest.fixture
def no_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEMPORAL_NAMESPACE", raising=False)


@pytest.mark.usefixtures("no_namespace")
def test_an_address_of_temporal_cloud_says_namespace_and_tls() -> None:
    """The address of a namespace implies port, namespace and TLS."""
    found = _cloud(address=CLOUD)

    assert (found.address, found.namespace, bool(found.tls)) == (
        f"{CLOUD}:7233",
        "orders.a1b2c",
        True,
    )


@pytest.mark.usefixtures("no_namespace")
def test_a_region_of_temporal_cloud_takes_a_key_and_a_full_namespace() -> None:
    """A regional endpoint with an API key is used over TLS, in the configured namespace."""
    found = _cloud(address=REGION, namespace="orders.a1b2c", api_key=KEY)

    assert (found.address, found.namespace, bool(found.tls), found.api_key) == (
        REGION,
        "orders.a1b2c",
        True,
        KEY,
    )


@pytest.mark.usefixtures("no_namespace")
@pytest.mark.parametrize(
    ("temporal", "fix"),
    [
        ({"address": CLOUD, "namespace": "orders"}, "serves the namespace 'orders.a1b2c'"),
        ({"address": REGION, "api_key": KEY}, "set PERDURE_TEMPORAL__NAMESPACE"),
        ({"address": REGION, "namespace": "orders.a1b2c"}, "accepts only API keys"),
        ({"api_key": KEY}, "set PERDURE_TEMPORAL__ADDRESS"),
        ({"tls": "on"}, "set PERDURE_TEMPORAL__ADDRESS"),
        ({"address": "x:1", "tls_cert_file": "/a"}, "set PERDURE_TEMPORAL__TLS_KEY_FILE too"),
        ({"address": "x:1", "tls_ca_file": "/nonexistent/ca"}, "cannot read /nonexistent/ca"),
    ],
)
def test_a_contradiction_is_refused_with_its_fix(temporal: dict[str, Any], fix: str) -> None:
    """A contradiction is refused before anything connects, and the message names what to set."""
    with pytest.raises(ConfigurationError, match=fix):
        configured_address(Settings(temporal=temporal))


@pytest.mark.usefixtures("no_namespace")
@pytest.mark.parametrize(
    ("temporal", "tls"),
    [
        ({"address": "temporal.internal"}, False),
        ({"address": "temporal.internal", "api_key": KEY}, True),
        ({"address": "temporal.internal", "api_key": KEY, "tls": "off"}, False),
        ({"address": "temporal.internal", "tls": "on"}, True),
    ],
)
def test_a_key_turns_tls_on(temporal: dict[str, Any], tls: bool) -> None:
    """An API key is never sent in plain text unless the settings say so."""
    assert bool(_cloud(**temporal).tls) is tls
