"""Locks of agents' programs move to another version by what the registries publish."""

import json
import zipfile
from pathlib import Path

import pytest

from perdure.agents.lock_update import update_lock
from perdure.errors import AgentError, ConfigurationError
from tests.unit.agents.test_npm_packages import Registry, registry

__all__ = ["registry"]


def test_an_npm_lock_moves_on_each_platform(registry: Registry, tmp_path: Path) -> None:
    """Version and hash come from the user's registry; a platform in the version stays."""
    old = {"package": "@tests/tool", "integrity": "sha512-old"}
    lock = {
        "linux-x64": {**old, "version": "1.2.3-linux-x64"},
        "linux-arm64": {**old, "version": "1.2.3-linux-arm64"},
    }
    (tmp_path / "tool.json").write_text(json.dumps(lock))
    registry.content = json.dumps({"dist": {"integrity": "sha512-new"}}).encode()
    files = update_lock(tmp_path, "tool", "1.3.0")
    new = {"package": "@tests/tool", "integrity": "sha512-new"}

    assert json.loads(files[0].read_text()) == {
        "linux-x64": {**new, "version": "1.3.0-linux-x64"},
        "linux-arm64": {**new, "version": "1.3.0-linux-arm64"},
    }
    assert registry.seen == [
        ("/npm/@tests%2ftool/1.3.0-linux-x64", "Bearer k"),
        ("/npm/@tests%2ftool/1.3.0-linux-arm64", "Bearer k"),
    ]


def test_an_npm_lock_stays_if_the_registry_lacks_the_version(
    registry: Registry, tmp_path: Path
) -> None:
    """The error names package, version and host."""
    registry.statuses = [404]
    (tmp_path / "tool.json").write_text('{"any": {"package": "tool", "version": "1.2.3"}}')
    with pytest.raises(AgentError, match=r"127.0.0.1:\d+ does not describe tool@1.3.0: .*404"):
        update_lock(tmp_path, "tool", "1.3.0")

    assert "1.2.3" in (tmp_path / "tool.json").read_text()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with two versions of `tool`, `tool-extra` and `other`; its folder of locks."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("tool", "tool-extra", "other"):
        for version in ("1.0", "2.0"):
            file = f"{name.replace('-', '_')}-{version}"
            with zipfile.ZipFile(wheels / f"{file}-py3-none-any.whl", "w") as wheel:
                about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                wheel.writestr(f"{file}.dist-info/METADATA", about)
                wheel.writestr(f"{file}.dist-info/WHEEL", "Wheel-Version: 1.0\n")
                wheel.writestr(f"{file}.dist-info/RECORD", "")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    locks = tmp_path / "locks"
    locks.mkdir()
    return locks


def test_a_python_lock_moves_with_the_packages_of_its_version(index: Path) -> None:
    """The agent's packages move together, and a dependency keeps its locked version."""
    (index / "tool.in").write_text("tool==1.0\ntool-extra==1.0\nother\n")
    (index / "tool.txt").write_text("other==1.0\n")
    files = update_lock(index, "tool", "2.0")
    locked = [line.split(" ")[0] for line in files[1].read_text().splitlines() if "==" in line]

    assert files[0].read_text() == "tool==2.0\ntool-extra==2.0\nother\n"
    assert locked == ["other==1.0", "tool==2.0", "tool-extra==2.0"]
    assert "--hash=sha256:" in files[1].read_text()


def test_a_python_version_that_no_index_has_is_named(index: Path) -> None:
    """uv's reason is in the error."""
    (index / "tool.in").write_text("tool==1.0\n")

    with pytest.raises(AgentError, match=r"no version of tool==3.0"):
        update_lock(index, "tool", "3.0")


@pytest.mark.parametrize(
    ("agent", "version", "said"),
    [("oracle", "1.0", "'oracle' has no lock"), ("tool", "1.0\nevil", "is not a version")],
)
def test_a_mistake_is_refused(index: Path, agent: str, version: str, said: str) -> None:
    """An agent without a program, and a word that would write more than a version."""
    (index / "tool.in").write_text("tool==1.0\n")

    with pytest.raises(ConfigurationError, match=said):
        update_lock(index, agent, version)
