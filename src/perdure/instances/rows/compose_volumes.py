"""Reads the volumes of the services of a compose file.

A named volume that several containers mount is a folder that they share. One that a single container
mounts, and an anonymous one, needs nothing: a container's own disk ends with the sandbox too. Files of
the task's folder are copied into the service's image.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from perdure.types import SharedFolder
from perdure.types.validation_errors import faults

CONTEXT = "${CONTEXT_DIR}"
"""Harbor's variable for the folder of the compose file."""
HOST_LOGS = "${HOST_"
"""Begins the entries of the log folders that Harbor mounts in its own container."""


class _Mount(NamedTuple):
    service: str
    target: str
    read_only: bool


class ComposeVolumes:
    """Collects the volumes of all services, and what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.problems: list[str] = []
        self._named: dict[str, list[_Mount]] = {}
        self._files: dict[Path, list[_Mount]] = {}

    def read(
        self, service: str, entries: Iterable[Any], text_of: Callable[[Any], str]
    ) -> dict[str, str]:
        """Paths inside -> files or folders of the task. `text_of`: replaces variables."""
        files = {}
        for entry in entries:
            if str(entry).startswith(HOST_LOGS):
                continue
            kind, source, target, read_only = _parts(entry, text_of)
            mount = _Mount(service, target.rstrip("/"), read_only)
            if not mount.target.startswith("/") or ":" in target:
                self._refuse(service, f"{entry!r} has no absolute path in the container")
            elif kind == "volume" and source:
                self._named.setdefault(source, []).append(mount)
            elif kind == "bind" and (path := self._path(service, source)) is not None:
                self._files.setdefault(path, []).append(mount)
                files[mount.target] = str(path)
            elif kind not in ("volume", "bind", "tmpfs"):
                self._refuse(service, f"Perdure has no equivalent of the type {kind!r}")
        return files

    def _path(self, service: str, source: str) -> Path | None:
        """None if there is none: Docker then mounts an empty folder."""
        path = (self.folder / source.replace(CONTEXT, ".")).resolve()
        if not path.is_relative_to(self.folder):
            self._refuse(
                service, f"{source!r} is not in the task's folder environment: move it there"
            )
            return None
        return path if path.exists() else None

    def shared(self, declared: Mapping[str, Any]) -> list[tuple[str, SharedFolder]]:
        """Each mount of a shared folder, with the container's name. `declared`: the table `volumes` of the
        compose file."""
        for name, options in declared.items():
            if strange := sorted({*(options or {})} - {"name", "labels", "driver"}):
                self.problems.append(
                    f"volumes.{name}: Perdure has no equivalent of {', '.join(strange)}"
                )
        for path, mounts in self._files.items():
            if len(mounts) > 1 and not all(mount.read_only for mount in mounts):
                who = " and ".join(dict.fromkeys(mount.service for mount in mounts))
                self.problems.append(
                    f"{who} share {path.name!r}, and each gets a copy of its own: mount it "
                    "read-only (`:ro`), or share a named volume"
                )
        found = []
        for at, (name, mounts) in enumerate(self._named.items()):
            slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:30]
            for service, target, read_only in mounts if len(mounts) > 1 else ():
                try:
                    folder = SharedFolder(
                        name=f"{slug}-{at}".strip("-"), target=target, read_only=read_only
                    )
                except ValidationError as error:
                    self._refuse(service, faults(error))
                else:
                    found.append((service, folder))
        return found

    def _refuse(self, service: str, reason: str) -> None:
        self.problems.append(f"it does not support `services.{service}.volumes`: {reason}")


def _parts(entry: Any, text_of: Callable[[Any], str]) -> tuple[str, str, str, bool]:
    """Kind, source, target, whether it is read-only."""
    if isinstance(entry, dict):
        source, target = text_of(entry.get("source", "")), text_of(entry.get("target", ""))
        return str(entry.get("type")), source, target, bool(entry.get("read_only"))
    first, *rest = text_of(entry).replace(CONTEXT, ".").split(":")
    if not rest:
        return "volume", "", first, False
    kind = "bind" if first.startswith((".", "/", "~")) else "volume"
    return kind, first, rest[0], "ro" in ",".join(rest[1:]).split(",")
