"""The sandbox providers of a home, with the same configuration that its workers use."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from perdure import home_folder, variant_registry
from perdure.errors import ConfigurationError, MissingDependency, PerdureError
from perdure.rollouts.admission.host_seats import Seats
from perdure.sandboxes.base import SandboxInfo, SandboxProvider
from perdure.settings.settings_tree import Settings

LOOK_S = 5.0
"""Seconds that a provider has to list its sandboxes; `perdure down` does not wait longer."""
KILL_S = 20.0
"""Seconds to kill one sandbox."""


def provider(settings: Settings, name: str) -> SandboxProvider:
    """Raises: ConfigurationError for an unknown name."""
    make: Callable[[Settings], SandboxProvider] = variant_registry.load(
        "sandbox", variant_registry.SANDBOXES, name
    )
    return make(settings)


def ready_provider(settings: Settings, name: str) -> SandboxProvider:
    """A provider that works on this host. Raises: MissingDependency with the first problem's fix."""
    found = provider(settings, name)
    if problems := found.check():
        raise MissingDependency(problems[0])
    return found


async def kill_all(settings: Settings, tell: Callable[[str], None]) -> int:
    """Kill every sandbox that is bound to this host and free its seat; return how many were alive.

    `tell` gets a warning for each provider that did not answer.
    """
    killed = 0
    seats = Seats(settings.home.absolute() / "run" / "seats", settings.slots.agent)
    for name in home_folder.list_recorded_providers(settings.home.absolute()):
        try:
            found = provider(settings, name)
        except ConfigurationError as error:  # a dotted path whose module has moved
            tell(f"warning: sandboxes of {name} are left to their time limit: {error}")
            continue
        try:
            killed += await _kill(found, seats) if found.host_bound else 0
        except PerdureError as error:  # the other providers still get their turn
            tell(f"warning: sandboxes of {name} are left to their time limit: {error}")
        except TimeoutError:
            tell(f"warning: sandboxes of {name} are left to their time limit: it does not answer")
    return killed


async def has_live_sandboxes(settings: Settings) -> bool:
    """Whether a sandbox that is bound to this host is alive. Providers that do not answer are skipped."""
    return any(box.alive for box in await _on_host(settings, {}))


async def count_sandboxes(settings: Settings, labels: Mapping[str, str]) -> int:
    """Sandboxes on this host with these labels, in any state. Providers that do not answer are skipped."""
    return len(await _on_host(settings, labels))


async def _on_host(settings: Settings, labels: Mapping[str, str]) -> list[SandboxInfo]:
    boxes: list[SandboxInfo] = []
    for name in home_folder.list_recorded_providers(settings.home.absolute()):
        with contextlib.suppress(PerdureError, TimeoutError):
            found = provider(settings, name)
            if found.host_bound:
                async with asyncio.timeout(LOOK_S):
                    boxes += await found.list(labels)
    return boxes


async def _kill(found: SandboxProvider, seats: Seats) -> int:
    killed = 0
    async with asyncio.timeout(LOOK_S):
        boxes = await found.list()
    for box in boxes:
        async with asyncio.timeout(KILL_S):
            await found.kill(box.identity)
        seats.leave(box.identity)
        killed += box.alive
    return killed
