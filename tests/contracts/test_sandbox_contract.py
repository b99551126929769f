"""Every sandbox provider of this checkout keeps the contract."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.errors import SandboxLost
from perdure.sandboxes.base import Exec, SandboxSpec
from perdure.sandboxes.providers.apptainer import ApptainerProvider
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.local import LocalProvider, LocalSandbox
from perdure.sandboxes.providers.podman import PodmanProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.sandbox_contract import SandboxContract
from tests.doubles.apptainer_cli import write_program


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A unix socket's path must stay below 108 bytes; pytest's own folders are long."""
    with tempfile.TemporaryDirectory(prefix="pd-") as folder:
        yield Path(folder)


class TestLocal(SandboxContract):
    hides_environment = False  # /proc/1 is the host's

    @pytest.fixture
    def provider(self, tmp_path: Path) -> LocalProvider:
        return LocalProvider(Settings(home=tmp_path / "home", sandbox={"allow_local": True}))


async def test_sandbox_whose_folder_went_away_is_lost(tmp_path: Path) -> None:
    """If another process kills it between two of our steps, the error is SandboxLost."""
    box = await LocalProvider(
        Settings(home=tmp_path / "home", sandbox={"allow_local": True})
    ).create(SandboxSpec("/testbed"), "one")
    assert isinstance(box, LocalSandbox)
    folder = box.box.path.rename(tmp_path / "taken")
    try:
        for step in (box.touch(60), box.start("x", Exec(["true"]))):
            with pytest.raises(SandboxLost):
                await step
    finally:
        folder.rename(box.box.path)
        await box.kill()


class TestBubblewrap(SandboxContract):
    @pytest.fixture
    def provider(self, tmp_path: Path) -> BubblewrapProvider:
        provider = BubblewrapProvider(Settings(home=tmp_path / "home"))
        if missing := provider.check():
            pytest.skip(missing[0])
        return provider


@pytest.mark.longer
class TestPodman(SandboxContract):
    @pytest.fixture
    def provider(self, tmp_path: Path) -> PodmanProvider:
        provider = PodmanProvider(Settings(home=tmp_path / "home"))
        if missing := provider.check():
            pytest.skip(missing[0])
        return provider


@pytest.mark.longer
class TestApptainerOverItsDouble(SandboxContract):
    """The command lines and the code after them. A double replaces Apptainer itself."""

    runs_commands_as = "TestBubblewrap"

    @pytest.fixture
    def provider(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ApptainerProvider:
        if missing := BubblewrapProvider(Settings(home=tmp_path / "home")).check():
            pytest.skip(missing[0])
        monkeypatch.setenv("PERDURE_APPTAINER__PROGRAM", str(write_program(tmp_path / "bin")))
        monkeypatch.setenv("APPTAINER_CONFIGDIR", str(tmp_path / "apptainer"))
        return ApptainerProvider(Settings(home=tmp_path / "home"))
