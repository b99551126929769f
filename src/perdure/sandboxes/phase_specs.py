"""Provider, limits and network of each sandbox phase, from the request and the instance.

A phase is what a sandbox is for: to build an environment, to run the agent, to grade. Of the fields
that are set, the most specific wins: the request's for this phase, then the instance's, then the
request's `sandbox` and `limits`. An instance is data: it cannot grant itself a network.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from perdure.errors import ConfigurationError
from perdure.sandboxes.base import Network, SandboxProvider
from perdure.types import Instance, Limits, Phase, PhaseName, RolloutRequest
from perdure.types.allowed_hosts import allowed_host

INSTALL_LIMITS = Limits(memory_mb=8192, cpus=4, pids=2048, disk_mb=16_384, output_mb=64)
"""Limits of the sandbox that builds an environment, once for all rollouts."""
SANDBOX_LIMITS = Limits()
"""The limits of a sandbox if nothing sets others."""
PHASES: tuple[PhaseName, ...] = ("environment", "agent", "grade")
OF_ROW = "instance "
"""Begins the name of a field that the instance sets."""

Providers = Callable[[str], SandboxProvider]


@dataclass(frozen=True)
class PhasePlacement:
    """Where one phase runs. `provider` is empty for an environment that any provider may build."""

    provider: str
    limits: Limits
    network: Network
    allowed_hosts: tuple[str, ...] = ()
    """Of Network.LISTED."""
    of_row: bool = False
    """The instance gave `allowed_hosts`, so the worker's settings must permit them."""


@dataclass(frozen=True)
class _Fields:
    """The fields that the request and the instance set for one phase."""

    phase: PhaseName
    request: Phase
    instance: Phase

    def limits(self) -> dict[str, tuple[float | str, str]]:
        """Limit -> its value, and the field that sets it."""
        found: dict[str, tuple[float | str, str]] = {}
        for source, fields in ((OF_ROW, self.instance), ("", self.request)):
            for name, value in fields.limits.model_dump(exclude_none=True).items():
                found[name] = value, f"{source}phases.{self.phase}.limits.{name}"
        return found


def place(request: RolloutRequest, instance: Instance | None, phase: PhaseName) -> PhasePlacement:
    """Raises: ConfigurationError if an instance asks for a network and the request sets none."""
    fields = _fields(request, instance, phase)
    building = phase == "environment"
    limits = INSTALL_LIMITS if building else request.limits
    changes = {name: value for name, (value, _) in fields.limits().items()}
    return PhasePlacement(
        provider=fields.request.provider
        or fields.instance.provider
        or ("" if building else request.sandbox),
        limits=limits.model_copy(update=changes),
        **_network(fields),
    )


def check(request: RolloutRequest, instance: Instance | None, providers: Providers) -> None:
    """Raises: ConfigurationError naming the field that no provider of its phase can honour."""
    for phase in PHASES:
        placement = place(request, instance, phase)
        if phase == "environment" and placement.limits.gpu:
            raise ConfigurationError(
                "phases.environment.limits.gpu: builds get no GPU; leave it out, or set it for "
                "phases.agent or phases.grade"
            )
        has_builds = instance is not None and any(one.build for one in instance.environments)
        if phase == "environment" and placement.network is Network.LISTED and has_builds:
            for other in ("agent", "grade"):
                check_build_list(providers(place(request, instance, other).provider))
        if placement.provider:
            provider = providers(placement.provider)
            met = provider.ample
            if instance is not None and instance.environment.build is not None:
                met |= provider.fixed_by_image
            _check(_fields(request, instance, phase), request, placement, provider, met)


def check_build_list(builder: SandboxProvider) -> None:
    """Raises: ConfigurationError if its builds of Dockerfiles cannot be limited to a list of hosts."""
    if not builder.has_build_proxy:
        raise ConfigurationError(
            f"phases.environment.network: builds of {builder.name} take no list of hosts; leave it "
            "out, or use --sandbox podman, or docker with an engine of this host"
        )


def _check(
    fields: _Fields,
    request: RolloutRequest,
    placement: PhasePlacement,
    provider: SandboxProvider,
    met: frozenset[str],
) -> None:
    """`met`: limits that the provider gives a row although it does not enforce them."""
    building = fields.phase == "environment"
    if building and not (provider.sees_host and provider.isolated):
        raise ConfigurationError(
            "phases.environment.provider: environments are built on this host and in isolation, "
            f"which {provider.name} cannot do; set it to bubblewrap or podman, or leave it out"
        )
    general = set() if building else request.limits.model_fields_set
    asked = {name: f"limits.{name}" for name in sorted(general)}
    asked |= {name: field for name, (_, field) in fields.limits().items()}
    for name, field in asked.items():
        if name in met and field.startswith(OF_ROW):
            continue
        if name not in provider.limits:
            held = ", ".join(sorted(provider.limits)) or "nothing"
            raise ConfigurationError(
                f"{field}: {provider.name} cannot enforce this limit, only {held}; "
                "leave it out, or choose another provider"
            )
    shares = placement.network is Network.HOST and provider.host_bound and provider.isolated
    if shares and not building:
        raise ConfigurationError(
            f"phases.{fields.phase}.network: a sandbox of {provider.name} on the host's network "
            "could reach the engines over loopback; leave it out, or choose a provider whose "
            "sandboxes run on other hosts"
        )
    network = fields.request.network or fields.instance.network
    if network is not None and placement.network not in provider.networks:
        can = ", ".join(sorted(provider.networks - {Network.LISTED}))
        wanted = "a list of hosts" if placement.network is Network.LISTED else repr(network)
        raise ConfigurationError(
            f"phases.{fields.phase}.network: {provider.name} does not support {wanted}, only "
            f"{can}; leave it out, or choose another provider"
        )
    if placement.network is Network.LISTED and (why := provider.no_list(placement.allowed_hosts)):
        raise ConfigurationError(
            f"phases.{fields.phase}.network: {provider.name} cannot use this list of hosts: {why}"
        )
    if not provider.isolated and (refusal := provider.check()):
        raise ConfigurationError(f"phases.{fields.phase}: {refusal[0]}")


def _fields(request: RolloutRequest, instance: Instance | None, phase: PhaseName) -> _Fields:
    of_instance = getattr(instance.phases, phase) if instance is not None else Phase()
    return _Fields(phase, getattr(request.phases, phase), of_instance)


class _Network(TypedDict):
    network: Network
    allowed_hosts: tuple[str, ...]
    of_row: bool


def _network(fields: _Fields) -> _Network:
    request, instance = fields.request.network, fields.instance.network
    building = fields.phase == "environment"
    if "index" in (request, instance) and not building:
        raise ConfigurationError(
            f"phases.{fields.phase}.network: 'index' is only for phases.environment; set it to "
            "'none', or leave it out"
        )
    if request is None and instance == "host":
        raise ConfigurationError(
            f"the instance asks for phases.{fields.phase}.network 'host', which only a request may "
            f"grant; set phases.{fields.phase}.network to 'host' in the request, or to 'none' to "
            "run it without a network"
        )
    chosen = request or instance
    if isinstance(chosen, tuple):
        return _Network(network=Network.LISTED, allowed_hosts=chosen, of_row=request is None)
    usual = Network.INDEX if building else Network.NONE
    return _Network(network=Network(chosen or usual), allowed_hosts=(), of_row=False)


def check_row_hosts(placement: PhasePlacement, phase: PhaseName, ref: str, permitted: str) -> None:
    """`permitted`: entries of the setting, separated by commas. Raises: ConfigurationError if a row
    lists a host that they do not cover: rows come from elsewhere, and the proxy is in your network.
    """
    if not placement.of_row:
        return
    known = [allowed_host(entry) for entry in permitted.replace(",", " ").split()]
    wanted = [allowed_host(entry) for entry in placement.allowed_hosts]
    lacking = [str(one) for one in wanted if not any(entry.covers(one) for entry in known)]
    if lacking:
        raise ConfigurationError(
            f"{ref} lists hosts for phases.{phase}.network: permit them with "
            f"PERDURE_SANDBOX__ROW_HOSTS={','.join(lacking)}, or set phases.{phase}.network to "
            "'none' in the request"
        )
