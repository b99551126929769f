"""Podman with a storage of the tests' own: its images, mounts and settings are gone at the end."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perdure.sandboxes.providers.podman import PodmanProvider, usable_runtime
from perdure.settings.settings_tree import Settings

STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
SETTINGS = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
INSECURE = '[[registry]]\nlocation = "{address}"\ninsecure = true\n\n'


def why_not(home: Path) -> str:
    """Empty, or why podman runs no container here."""
    if os.geteuid() != 0:
        return "the tests mount what podman built: they need root"
    return "; ".join(PodmanProvider(Settings(home=home)).check())


@dataclass(frozen=True)
class Podman:
    folder: Path

    @property
    def env(self) -> Mapping[str, str]:
        """What makes any podman on this host use this storage, these registries and no other login."""
        return {
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(self.folder / "registries.conf"),
            "REGISTRY_AUTH_FILE": str(self.folder / "auth.json"),
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
        }

    def trust(self, addresses: Sequence[str]) -> None:
        """Ask these registries, too, over plain HTTP."""
        file = self.folder / "registries.conf"
        known = file.read_text() if file.exists() else ""
        texts = [INSECURE.format(address=address) for address in addresses]
        file.write_text(known + "".join(text for text in texts if text not in known))

    def __call__(self, *arguments: str) -> str:
        done = self._run(arguments)
        assert done.returncode == 0, f"{' '.join(done.args)}: {done.stderr[-2000:]}"
        return done.stdout.strip()

    def does(self, *arguments: str) -> bool:
        """Whether the command ends without an error."""
        return self._run(arguments).returncode == 0

    def _run(self, arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        env = {**os.environ, **self.env}
        command = ["podman", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    def build(self, tag: str, context: str) -> None:
        """An image of the folder's Containerfile."""
        self("build", "--quiet", "--network=none", "--tag", tag, context)

    def clear(self) -> None:
        self("image", "umount", "--all", "--force")
        self("rmi", "--all", "--force")


@contextmanager
def podman_in(folder: Path, settings: str = "") -> Iterator[Podman]:
    """`settings`: more of containers.conf."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime = f'runtime = "{name}"\n' if (name := usable_runtime()) else ""
    (folder / "containers.conf").write_text(SETTINGS + runtime + settings)
    (folder / "storage.conf").write_text(STORAGE.format(folder=folder))
    (folder / "auth.json").write_text("{}")
    podman = Podman(folder)
    podman.trust(())
    try:
        yield podman
    finally:
        podman.clear()
        subprocess.run(["umount", folder / "graph/overlay"], check=False, capture_output=True)
