"""The reaper kills sandboxes without an owner, and no others. It uses real `local` sandboxes."""

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.sandboxes.base import SandboxInfo, SandboxSpec
from perdure.sandboxes.providers.local import LocalProvider
from perdure.sandboxes.reaper import SweepReport, sweep
from perdure.settings.tree import Settings

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


async def is_open(info: SandboxInfo) -> bool:
    return info.labels["rollout"] == OWNED["rollout"]


async def test_orphan_is_killed_after_its_grace(provider: LocalProvider) -> None:
    """A sandbox whose rollout is closed goes, one whose rollout is open stays."""
    await boot(provider, "owned", OWNED)
    await boot(provider, "orphan", ORPHAN)
    report = await sweep([provider], is_open, grace_s=600, now=time.time() + 601)

    assert report == SweepReport(found=2, kept=1, killed=1)
    assert [info.identity for info in await provider.list()] == ["owned"]


async def test_young_orphan_is_kept(provider: LocalProvider) -> None:
    """Within the grace period a create whose answer was lost may still be adopted."""
    await boot(provider, "orphan", ORPHAN)
    report = await sweep([provider], is_open, grace_s=600, now=time.time() + 599)

    assert report == SweepReport(found=1, kept=1)


async def test_expired_is_killed_though_owned(provider: LocalProvider) -> None:
    """A sandbox past its deadline goes, even if its owner is alive."""
    await boot(provider, "owned", OWNED)
    report = await sweep([provider], is_open, grace_s=600, now=time.time() + HOUR + 1)

    assert report == SweepReport(found=1, killed=1)


async def test_foreign_is_left_alone(provider: LocalProvider) -> None:
    """A sandbox without owner labels is never judged an orphan."""
    await boot(provider, "foreign", {"team": "other"})
    report = await sweep([provider], is_open, grace_s=0, now=time.time() + 600)

    assert report == SweepReport(found=1, kept=1)
