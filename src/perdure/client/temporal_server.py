"""The user's Temporal server: its address, namespace, TLS and API key.

Each `PERDURE_TEMPORAL__*` setting overrides the same field in the variables and profiles of
Temporal's own tools. This module knows the address forms of Temporal Cloud. It makes no connection.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.errors import ConfigurationError
from perdure.settings import process_environment
from perdure.settings.settings_tree import Settings, TemporalSettings

if TYPE_CHECKING:
    from temporalio.envconfig import ClientConfigTLS
    from temporalio.service import TLSConfig

DEFAULT_PORT = 7233
DEFAULT_NAMESPACE = "default"
CLOUD = ".tmprl.cloud"
"""Suffix of a namespace's address in Temporal Cloud: `<namespace>.<account>.tmprl.cloud`."""
CLOUD_REGION = ".api.temporal.io"
"""Suffix of a region's address in Temporal Cloud, such as `us-east-1.aws.api.temporal.io`."""


@dataclass(frozen=True)
class Server:
    """The connection parameters of a client. The address is empty if none is configured."""

    address: str = ""
    namespace: str = DEFAULT_NAMESPACE
    tls: "bool | TLSConfig" = False
    api_key: str | None = field(default=None, repr=False)
    metadata: dict[str, str] = field(default_factory=dict, repr=False)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `Client.connect`."""
        return {
            "target_host": self.address,
            "namespace": self.namespace,
            "tls": self.tls,
            "api_key": self.api_key,
            "rpc_metadata": self.metadata,
        }


def configured_address(settings: Settings) -> str | None:
    """The address in Perdure's settings, TEMPORAL_ADDRESS, TEMPORAL_PROFILE or Temporal's TOML
    file.

    None if no server is configured; commands then use the stack's. Raises: ConfigurationError.
    """
    if not (_is_named(settings.temporal) or _has_profile()):
        return None  # before the SDK is imported, which some long-lived programs avoid
    server = configured_server(settings)
    if not server.address and (server.api_key is not None or server.tls):
        raise ConfigurationError(
            "an API key or TLS is set for Temporal, but no address: set PERDURE_TEMPORAL__ADDRESS "
            f"or TEMPORAL_ADDRESS; in Temporal Cloud it is <namespace>.<account>{CLOUD}:7233"
        )
    return server.address or None


def configured_server(settings: Settings, address: str = "") -> Server:
    """The server that settings, variables and profile describe. `address` overrides theirs.

    Raises: ConfigurationError if they contradict each other, or if a file cannot be read.
    """
    from temporalio.envconfig import ClientConfigProfile

    try:
        profile = ClientConfigProfile.load()
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigurationError(f"Temporal's configuration is wrong: {error}") from error
    ours = settings.temporal
    target = with_port(address or ours.address or profile.address or "")
    api_key = ours.api_key.get_secret_value().strip() or profile.api_key or None
    return Server(
        address=target,
        namespace=_namespace(target, ours.namespace or profile.namespace or "", api_key),
        tls=_tls(ours, profile.tls, wanted=api_key is not None or _is_cloud(_host(target))),
        api_key=api_key,
        metadata=dict(profile.grpc_meta),
    )


def dev_server(settings: Settings, address: str) -> Server:
    """The server that `perdure up` starts. Settings of another server do not apply to it."""
    return Server(address, settings.temporal.namespace or DEFAULT_NAMESPACE)


def with_port(address: str) -> str:
    """`host` -> `host:7233`, Temporal's default port. An IPv6 address must be in brackets."""
    _, colon, port = address.rpartition("]")[2].rpartition(":")
    return address if not address or (colon and port) else f"{address}:{DEFAULT_PORT}"


def _is_named(ours: TemporalSettings) -> bool:
    """Whether Perdure's settings configure a server."""
    named = (ours.address, ours.tls_ca_file, ours.tls_cert_file, ours.tls_key_file)
    return any((*named, ours.api_key.get_secret_value(), ours.tls_server_name, ours.tls == "on"))


def _has_profile() -> bool:
    """Whether there may be variables or a file of Temporal's own tools."""
    if sys.platform != "linux" or any(
        n.startswith("TEMPORAL_") for n in process_environment.variables()
    ):
        return True
    found = process_environment.variables().get("XDG_CONFIG_HOME", "")
    folders = [Path.home() / ".config", *([Path(found)] if found else [])]
    return any((folder / "temporalio" / "temporal.toml").exists() for folder in folders)


def _host(address: str) -> str:
    return address.rpartition(":")[0].lower()


def _is_cloud(host: str) -> bool:
    return host.endswith((CLOUD, CLOUD_REGION))


def _namespace(address: str, namespace: str, api_key: str | None) -> str:
    """Raises: ConfigurationError if Temporal Cloud would refuse it with a less helpful message."""
    host = _host(address)
    if host.endswith(CLOUD):
        own = host.removesuffix(CLOUD)
        if namespace and namespace != own:
            raise ConfigurationError(
                f"{address} serves the namespace {own!r}, not {namespace!r}: in Temporal Cloud a "
                "namespace is written <namespace>.<account>; leave it unset to use the address's"
            )
        return own
    if host.endswith(CLOUD_REGION):
        if "." not in namespace:
            raise ConfigurationError(
                f"{address} serves many namespaces, and {namespace or DEFAULT_NAMESPACE!r} is not one of "
                "Temporal Cloud: set PERDURE_TEMPORAL__NAMESPACE to <namespace>.<account>"
            )
        if api_key is None:
            raise ConfigurationError(
                f"{address} accepts only API keys: set PERDURE_TEMPORAL__API_KEY, or for certificates "
                f"use the address {namespace}{CLOUD}:7233"
            )
    return namespace or DEFAULT_NAMESPACE


def _tls(
    ours: TemporalSettings, theirs: "ClientConfigTLS | None", *, wanted: bool
) -> "bool | TLSConfig":
    """`wanted`: use TLS unless a setting turns it off. Raises: ConfigurationError."""
    from temporalio.envconfig import ClientConfigTLS

    theirs = theirs or ClientConfigTLS()
    tls = ClientConfigTLS(
        disabled=_disabled(ours, theirs),
        server_name=ours.tls_server_name or theirs.server_name,
        server_root_ca_cert=ours.tls_ca_file or theirs.server_root_ca_cert,
        client_cert=ours.tls_cert_file or theirs.client_cert,
        client_private_key=ours.tls_key_file or theirs.client_private_key,
    )
    if (tls.client_cert is None) != (tls.client_private_key is None):
        lacking = "TLS_KEY_FILE" if tls.client_private_key is None else "TLS_CERT_FILE"
        raise ConfigurationError(
            f"a client certificate needs its private key: set PERDURE_TEMPORAL__{lacking} too"
        )
    wanted = wanted or any((tls.server_name, tls.server_root_ca_cert, tls.client_cert))
    if tls.disabled or (tls.disabled is None and not wanted):
        return False
    try:
        return tls.to_connect_tls_config()
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {error.filename}, which Temporal's TLS needs: {error.strerror}"
        ) from error


def _disabled(ours: TemporalSettings, theirs: "ClientConfigTLS") -> bool | None:
    if ours.tls != "auto":
        return ours.tls == "off"
    if any(isinstance(one, Path) for one in (ours.tls_ca_file, ours.tls_cert_file)):
        return None
    return theirs.disabled
