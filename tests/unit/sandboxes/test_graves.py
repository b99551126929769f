"""The removal of a sandbox, from the kill to the end of its folder."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.errors import RetryHere
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.sandbox_folder import SandboxFolder, SandboxMeta, timestamped_name
from perdure.sandboxes.host.sandbox_teardown import REMOVAL_PREFIX
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings


def meta_of(box: SandboxFolder, *groups: Path) -> SandboxMeta:
    meta = SandboxMeta("bubblewrap", box.identity, time.time(), "/testbed", {}, {}, 1, 1)
    return replace(meta, groups=tuple(map(str, groups)))


async def test_a_folder_that_is_being_removed_is_no_sandbox(tmp_path: Path) -> None:
    """It still has all its files, but `list` leaves it out: a sweep could not kill that name."""
    provider = BubblewrapProvider(Settings(home=tmp_path))
    box = SandboxFolder(provider.root / "p-1-agent-1")
    box.create_folder(meta_of(box), 60)
    before = await provider.list()
    box.path.rename(box.path.with_name(timestamped_name(REMOVAL_PREFIX)))

    assert ([one.identity for one in before], await provider.list()) == (["p-1-agent-1"], [])


async def test_a_sandbox_whose_groups_are_still_busy_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays listed, because its groups would otherwise remain. Folders stand in for cgroups."""
    monkeypatch.setattr(cgroups, "BUSY_S", 0.01)
    provider = BubblewrapProvider(Settings(home=tmp_path))
    box = SandboxFolder(provider.root / "p-1-agent-1")
    busy = tmp_path / "groups/box/command/its-last-process"
    busy.mkdir(parents=True)
    box.create_folder(meta_of(box, tmp_path / "groups/box"), 60)

    with pytest.raises(RetryHere, match="did not end"):
        await provider.kill(box.identity)
    listed = [one.identity for one in await provider.list()]
    busy.rmdir()
    await provider.kill(box.identity)

    assert listed == [box.identity]
    assert (await provider.list(), list((tmp_path / "groups").iterdir())) == ([], [])
