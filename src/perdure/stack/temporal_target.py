"""Which Temporal a command talks to: the user's own, else the stack's, else nobody's."""

from temporalio.envconfig import ClientConfig


def given_address() -> str | None:
    """What TEMPORAL_ADDRESS, TEMPORAL_PROFILE or Temporal's own TOML file name; None = nothing."""
    address: str | None = ClientConfig.load_client_connect_config().get("target_host")
    return address or None
