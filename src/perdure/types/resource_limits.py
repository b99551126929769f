"""Resource limits of a rollout, its sandbox phases, and provider accounts."""

from typing import Any, Literal

from pydantic import Field, field_validator

from perdure.types.allowed_hosts import allowed_hosts
from perdure.types.base import Request

NETWORKS = ("none", "index", "host")
GPU = r"^([A-Za-z][\w-]*!?(:[1-9]\d?)?)?$"


class LimitChanges(Request):
    """Limits of one phase that override the rollout's limits."""

    memory_mb: int | None = Field(None, ge=64)
    cpus: float | None = Field(None, gt=0)
    pids: int | None = Field(None, ge=16)
    disk_mb: int | None = Field(None, ge=16)
    output_mb: int | None = Field(None, ge=1)
    gpu: str | None = Field(None, pattern=GPU)


class Phase(Request):
    """Settings of one phase's sandbox that override the rollout's."""

    provider: str | None = None
    """A name of the sandbox registry, or a dotted path."""
    limits: LimitChanges = LimitChanges()
    network: Literal["none", "index", "host"] | tuple[str, ...] | None = None
    """`none`: only the gateway. `index`: only the package index, for builds. `host`: everything
    that the host or the provider's service can reach. A list: these hosts, enforced by a proxy or
    by the provider's service; builds also reach the package index."""

    @field_validator("network", mode="before")
    @classmethod
    def _is_mode_or_list(cls, value: Any) -> Any:
        if value is None or value in NETWORKS:
            return value
        if not isinstance(value, list | tuple):
            raise ValueError(
                f"it must be 'none', 'index', 'host' or a list of hosts, got {value!r}"
            )
        if not value:
            raise ValueError("an empty list allows no host: write 'none'")
        return allowed_hosts(map(str, value))


PhaseName = Literal["environment", "agent", "grade"]
"""The purpose of a sandbox."""


class Phases(Request):
    """The sandboxes of a rollout, by phase.

    Example:
        {"agent": {"network": ["pypi.org", "*.pythonhosted.org", "10.1.0.0/16:8443"]},
         "grade": {"provider": "podman", "limits": {"memory_mb": 8192}}}
    """

    environment: Phase = Phase()
    """The sandbox in which an environment's install lines run. It reaches the package index."""
    agent: Phase = Phase()
    """The sandbox that the boot stage creates and in which the agent works."""
    grade: Phase = Phase()
    """The fresh sandbox in which the tests run."""


class Limits(Request):
    """Resource limits of one sandbox."""

    memory_mb: int = Field(4096, ge=64)
    cpus: float = Field(2.0, gt=0)
    pids: int = Field(512, ge=16)
    disk_mb: int = Field(2048, ge=16)
    output_mb: int = Field(64, ge=1)
    """Cap on each command's captured stdout and stderr. A command that exceeds it is killed."""
    gpu: str = Field("", pattern=GPU)
    """A GPU of the provider, such as `T4` or `A100-80GB:2`. Empty: as the settings say."""


class AccountCaps(Request):
    """Caps of a sandbox provider's account. Perdure learns absent caps from the provider's
    refusals."""

    live: int | None = Field(None, ge=1)
    """Maximum number of sandboxes at a time."""
    creates_per_s: float | None = Field(None, gt=0)
    starting: int | None = Field(None, ge=1)
    """Maximum number of creates in progress at a time."""
