"""The name of a host: one per home and boot of a machine."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perdure import home_folder
from perdure.home_folder import host_of
from perdure.settings.settings_tree import Settings


def test_all_processes_of_a_home_agree(tmp_path: Path) -> None:
    """This holds even if several processes ask first at the same time."""
    with ThreadPoolExecutor(8) as asking:
        names = set(asking.map(host_of, [Settings(home=tmp_path / "home")] * 64))

    assert len(names) == 1


def test_two_machines_with_one_hostname_and_one_path_are_two_hosts(tmp_path: Path) -> None:
    """Their homes are different folders at the same path, as on machines made from one image."""
    place = tmp_path / "home"
    first = host_of(Settings(home=place))
    place.rename(tmp_path / "first")
    second = host_of(Settings(home=place))

    assert first.rpartition("-")[0] == second.rpartition("-")[0]
    assert first != second


def test_a_home_that_was_copied_with_the_machine_is_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy runs in another boot, and keeps its name there."""
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(home_folder, "BOOT_ID", boot)
    boot.write_text("one\n")
    original = host_of(Settings(home=tmp_path / "home"))
    boot.write_text("two\n")
    copy = host_of(Settings(home=tmp_path / "home"))

    assert original != copy
    assert host_of(Settings(home=tmp_path / "home")) == copy


def test_a_home_that_was_copied_on_its_machine_is_another_host(tmp_path: Path) -> None:
    """Two homes cannot reach each other's sandboxes."""
    original = host_of(Settings(home=tmp_path / "home"))
    shutil.copytree(tmp_path / "home", tmp_path / "copy")

    assert host_of(Settings(home=tmp_path / "copy")) != original


def test_an_empty_file_is_written_again(tmp_path: Path) -> None:
    """A power cut may leave an empty file."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "host").touch()

    assert host_of(Settings(home=tmp_path)) == host_of(Settings(home=tmp_path))
