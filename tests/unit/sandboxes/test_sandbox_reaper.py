"""The reaper kills sandboxes without an owner, and no others. It uses real `local` sandboxes."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.sandboxes.base import SandboxInfo, SandboxSpec
from perdure.sandboxes.providers.local import LocalProvider
from perdure.sandboxes.sandbox_reaper import Owner, Sweep, SweepReport
from perdure.settings.settings_tree import Settings

OWNED = {"run": "r", "rollout": "rollout/r/open/0", "attempt": "1"}
ORPHAN = {**OWNED, "rollout": "rollout/r/closed/0"}
HOUR = 3600.0
SPEC = SandboxSpec(workdir="/testbed", ttl_s=HOUR)


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    provider = LocalProvider(Settings(home=tmp_path / "home", sandbox={"allow_local": True}))
    yield provider
    for info in await provider.list():
        await provider.kill(info.identity)


async def boot(provider: LocalProvider, identity: str, labels: Mapping[str, str]) -> None:
    await provider.create(replace(SPEC, labels=labels), identity)


FATES = {OWNED["rollout"]: Owner.ALIVE, ORPHAN["rollout"]: Owner.ENDED}


async def fate(info: SandboxInfo) -> Owner:
    return FATES.get(info.labels["rollout"], Owner.UNKNOWN)


async def nothing(_: SandboxInfo) -> None:
    return None


async def test_an_orphan_is_killed_at_once(provider: LocalProvider) -> None:
    """A new sandbox whose rollout is closed is killed; one whose rollout is open is kept."""
    await boot(provider, "owned", OWNED)
    await boot(provider, "orphan", ORPHAN)
    orphans: list[str] = []

    async def orphaned(info: SandboxInfo) -> None:
        assert await provider.list({"rollout": info.labels["rollout"]}), "it is told beforehand"
        orphans.append(info.identity)

    report = await Sweep(fate, orphaned, 600, time.time()).over([provider])

    assert (report, orphans) == (SweepReport(found=2, kept=1, killed=1), ["orphan"])
    assert [info.identity for info in await provider.list()] == ["owned"]


async def test_a_sandbox_that_ends_slowly_holds_no_other(
    provider: LocalProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sandbox's processes end only after the second sandbox is removed."""
    for name in ("a-slow", "b-quick"):
        await boot(provider, name, ORPHAN)
    kill, gone = provider.kill, asyncio.Event()

    async def ending(identity: str) -> None:
        if identity == "a-slow":
            await gone.wait()
        await kill(identity)
        gone.set()

    monkeypatch.setattr(provider, "kill", ending)
    async with asyncio.timeout(60):
        report = await Sweep(fate, nothing, 600, time.time()).over([provider])

    assert report == SweepReport(found=2, killed=2)


@pytest.mark.parametrize(("age", "kept"), [(300, 1), (601, 0)])
async def test_the_sandbox_of_a_forgotten_rollout_has_a_grace(
    provider: LocalProvider, age: float, kept: int
) -> None:
    """The server does not know it: it may be started again, or belong to another server."""
    await boot(provider, "forgotten", {**OWNED, "rollout": "rollout/r/forgotten/0"})
    report = await Sweep(fate, nothing, 600, time.time() + age).over([provider])

    assert report == SweepReport(found=1, kept=kept, killed=1 - kept)


async def test_expired_is_killed_though_owned(provider: LocalProvider) -> None:
    """A sandbox past its deadline is killed, even if its owner is alive."""
    await boot(provider, "owned", OWNED)
    report = await Sweep(fate, nothing, 600, time.time() + HOUR + 1).over([provider])

    assert report == SweepReport(found=1, killed=1)


async def test_foreign_is_left_alone(provider: LocalProvider) -> None:
    """A sandbox without owner labels is never judged an orphan."""
    await boot(provider, "foreign", {"team": "other"})
    report = await Sweep(fate, nothing, 0, time.time() + 600).over([provider])

    assert report == SweepReport(found=1, kept=1)
