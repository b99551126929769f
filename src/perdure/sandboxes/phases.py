"""Where each phase of a rollout runs: provider, limits and network, from the request and the row.

The most specific word wins, field by field: the request's own for this phase, then the instance's,
then the request's `sandbox` and `limits`. An instance is data: it opens no network by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

from perdure.errors import ConfigurationError
from perdure.sandboxes.base import Network, SandboxProvider
from perdure.types import Instance, Limits, Phase, PhaseName, RolloutRequest

INSTALL_LIMITS = Limits(memory_mb=8192, cpus=4, pids=2048, disk_mb=16_384, output_mb=64)
"""Of the sandbox in which an environment is built, once for all rollouts."""
Providers = Callable[[str], SandboxProvider]


@dataclass(frozen=True)
class Place:
    """What one phase gets. `provider` is empty where a build runs wherever it can."""

    provider: str
    limits: Limits
    network: Network


@dataclass(frozen=True)
class _Words:
    """What was said about one phase: by the request (`ours`) and by the instance (`theirs`)."""

    phase: PhaseName
    ours: Phase
    theirs: Phase

    def limits(self) -> dict[str, tuple[float, str]]:
        """Limit -> its value, and the field that said so."""
        said: dict[str, tuple[float, str]] = {}
        for source, words in (("instance ", self.theirs), ("", self.ours)):
            for name, value in words.limits.model_dump(exclude_none=True).items():
                said[name] = value, f"{source}phases.{self.phase}.limits.{name}"
        return said


def place(request: RolloutRequest, instance: Instance | None, phase: PhaseName) -> Place:
    """Raises: ConfigurationError where an instance asks for a network and the request is silent."""
    words = _words(request, instance, phase)
    building = phase == "boot"
    limits = INSTALL_LIMITS if building else request.limits
    changes = {name: value for name, (value, _) in words.limits().items()}
    return Place(
        provider=words.ours.provider
        or words.theirs.provider
        or ("" if building else request.sandbox),
        limits=limits.model_copy(update=changes),
        network=_network(words),
    )


def check(request: RolloutRequest, instance: Instance | None, providers: Providers) -> None:
    """All that is asked for can be had, in every phase.

    Raises: ConfigurationError naming the field and what to do.
    """
    phases: tuple[PhaseName, ...] = ("boot", "agent", "grade")
    for phase in phases:
        chosen = place(request, instance, phase)
        if chosen.provider:
            _check(_words(request, instance, phase), request, chosen, providers(chosen.provider))


def _check(
    words: _Words, request: RolloutRequest, chosen: Place, provider: SandboxProvider
) -> None:
    building = words.phase == "boot"
    if building and not (provider.sees_host and provider.isolated):
        raise ConfigurationError(
            f"phases.boot.provider: environments are built on this host, in isolation, which "
            f"{provider.name} does not do: name bubblewrap or podman, or leave it out"
        )
    general = set() if building else request.limits.model_fields_set
    asked = {name: f"limits.{name}" for name in sorted(general)}
    asked |= {name: field for name, (_, field) in words.limits().items()}
    for name, field in asked.items():
        if name not in provider.limits:
            held = ", ".join(sorted(provider.limits)) or "nothing"
            raise ConfigurationError(
                f"{field}: a sandbox of {provider.name} cannot be held to it, only to {held}; "
                "leave it out, or choose another provider"
            )
    shares = chosen.network is Network.HOST and provider.host_bound and provider.isolated
    if shares and not building:
        raise ConfigurationError(
            f"phases.{words.phase}.network: a sandbox of {provider.name} on the host's network "
            "would reach its loopback, and with it the engines: leave it out, or choose a "
            "provider whose sandboxes are elsewhere"
        )
    said = words.ours.network or words.theirs.network
    if said is not None and chosen.network not in provider.networks:
        can = ", ".join(sorted(provider.networks))
        raise ConfigurationError(
            f"phases.{words.phase}.network: a sandbox of {provider.name} cannot have {said!r}, "
            f"only {can}; leave it out, or choose another provider"
        )


def _words(request: RolloutRequest, instance: Instance | None, phase: PhaseName) -> _Words:
    theirs = getattr(instance.phases, phase) if instance is not None else Phase()
    return _Words(phase, getattr(request.phases, phase), theirs)


def _network(words: _Words) -> Network:
    ours, theirs = words.ours.network, words.theirs.network
    if words.phase == "boot":
        return Network(ours or theirs or Network.HOST)
    if ours is None and theirs == "host":
        raise ConfigurationError(
            f"the instance wants phases.{words.phase}.network 'host', which only a request may "
            f"grant: set phases.{words.phase}.network to 'host', or to 'none' to run it without"
        )
    return Network(ours or theirs or Network.NONE)
