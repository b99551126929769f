"""Builds of images, and sidecars: containers that run next to the main one of a sandbox."""

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from perdure.types.base import Frozen

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Names and addresses of the loopback interface, which all containers of a sandbox share."""
MAIN = "main"
"""Name of the sandbox's own container, as in Harbor."""
SidecarName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Condition = Literal["started", "healthy"]
"""What a container waits for: the other's start, or its first passed health check."""


class Build(Frozen):
    """A Dockerfile from which each host builds an image, once per content."""

    path: str | None = None
    """The build context on the importing host. The import stores it and sets `key` instead."""
    key: str | None = None
    """Store key of the build context, a tar.gz with `Dockerfile` at its top."""
    timeout_s: float = Field(600.0, gt=0)
    dockerfile: str = ""
    """Its text, if the folder has none. The import adds it to the context and leaves this empty."""


class Healthcheck(Frozen):
    """A command that exits with 0 once the container can be used. Defaults are Docker's."""

    command: tuple[str, ...]
    interval_s: float = Field(30.0, gt=0)
    timeout_s: float = Field(30.0, gt=0)
    retries: int = Field(3, gt=0)
    start_period_s: float = Field(0.0, ge=0)
    start_interval_s: float = Field(5.0, gt=0)
    """Seconds between checks in the start period, for the sandbox's own container."""

    @property
    def limit_s(self) -> float:
        """Seconds after which Docker reports a container as unhealthy if no check has passed."""
        return self.start_period_s + self.retries * (self.interval_s + self.timeout_s)


class SharedFolder(Frozen):
    """Where a container of a sandbox sees a folder that its other containers see too. The folder
    begins empty and ends with the sandbox."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
    """Containers that name the same folder share it."""
    target: Annotated[str, StringConstraints(pattern=r"^/[^:,]*[^:,/]$")]
    read_only: bool = False


class Sidecar(Frozen):
    """A container next to the sandbox's own. All share one network, in which its name and its
    aliases are 127.0.0.1."""

    image: str | None = None
    build: Build | None = None
    """Makes `image`, as `Environment.build` does."""
    entrypoint: tuple[str, ...] | None = None
    """None: the image's."""
    command: tuple[str, ...] | None = None
    """None: the image's, unless there is an `entrypoint`."""
    env: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    """Paths inside -> files or folders of the importing host. The import adds them to the image and
    clears this."""
    folders: tuple[SharedFolder, ...] = ()
    workdir: str | None = None
    user: str | None = None
    aliases: tuple[SidecarName, ...] = ()
    healthcheck: Healthcheck | None = None
    """None: the image's."""
    checks_health: bool = True
    """False: it has no health check, not even the image's."""
    depends_on: dict[str, Condition] = Field(default_factory=dict)
    """Names of sidecars that it waits for. One that `completes` must have exited."""
    completes: bool = False
    """It does one job and exits with code 0, such as a migration."""
    restart: str = "no"
    """Docker's restart policy, such as `on-failure:3`."""
    memory_mb: int | None = Field(None, ge=6)
    """Default and maximum: the sandbox's own limit. The same holds for `cpus`."""
    cpus: float | None = Field(None, gt=0)


def _are_runnable(sidecars: dict[str, Sidecar]) -> dict[str, Sidecar]:
    """Raises: ValueError for a name that is reserved or unknown, no image, or a cycle."""
    for name, sidecar in sidecars.items():
        if name == MAIN:
            raise ValueError(f"{MAIN!r} is the sandbox's own container")
        if not sidecar.image and sidecar.build is None:
            raise ValueError(f"{name!r} has neither `image` nor `build`")
        for other in sidecar.depends_on:
            if other not in sidecars:
                raise ValueError(f"{name!r} depends on {other!r}, which is not a sidecar")
    try:
        start_order(sidecars)
    except CycleError as error:
        raise ValueError(f"{' -> '.join(error.args[1])} depend on each other") from None
    return sidecars


Sidecars = Annotated[dict[SidecarName, Sidecar], AfterValidator(_are_runnable)]


def host_names(sidecars: Mapping[str, Sidecar]) -> Sequence[str]:
    """Names that also lead to 127.0.0.1 in a sandbox with sidecars: its main container's, the
    sidecars', and their aliases."""
    names = [MAIN, *sidecars, *(alias for one in sidecars.values() for alias in one.aliases)]
    return tuple(dict.fromkeys(names))


def start_order(sidecars: dict[str, Sidecar]) -> tuple[str, ...]:
    """Names, each after those that it depends on. Raises: CycleError."""
    order = TopologicalSorter({name: one.depends_on for name, one in sidecars.items()})
    return tuple(order.static_order())
