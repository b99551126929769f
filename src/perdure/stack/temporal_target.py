"""Whether users name a Temporal server of their own; without one, commands talk to the stack's."""

from temporalio.envconfig import ClientConfig


def given_address() -> str | None:
    """The address in TEMPORAL_ADDRESS, TEMPORAL_PROFILE or Temporal's own TOML file; None: there is none."""
    address: str | None = ClientConfig.load_client_connect_config().get("target_host")
    return address or None
