"""What the providers on this host share: sandbox folders, adoption, removal of leftover folders."""

import asyncio
import contextlib
import fcntl
import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from perdure.durable_files import is_whole, publish_folder
from perdure.errors import NotFound, SandboxLost
from perdure.home_folder import make_readable_by_sandboxes
from perdure.sandboxes.base import Sandbox, SandboxInfo, SandboxProvider, SandboxSpec
from perdure.sandboxes.file_locks import locked
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.host_sandbox import HostSandbox
from perdure.sandboxes.host.sandbox_folder import (
    DRAFT,
    SandboxFolder,
    SandboxMeta,
    age_of,
    timestamped_name,
)
from perdure.sandboxes.host.sandbox_teardown import REMOVAL_PREFIX, destroy, lock_of
from perdure.sandboxes.spec_validation import check_identity, check_sidecars
from perdure.settings.settings_tree import Settings

STALE_S = 600.0
"""Seconds after which an unfinished or half-removed folder counts as abandoned."""


class HostProvider(SandboxProvider):
    """Keeps its sandboxes as folders `<home>/sandboxes/<name>/<identity>`."""

    host_bound = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.root = settings.home.absolute() / "sandboxes" / self.name

    async def create(self, spec: SandboxSpec, identity: str) -> Sandbox:
        check_identity(identity)
        check_sidecars(self, spec.sidecars)
        box = SandboxFolder(self.root / identity)
        async with locked(lock_of(box)):
            if box.ready:
                return self._adopt(box)
            if box.exists:  # its creator died during the boot and handed it to no caller
                await destroy(box)
            try:
                return await self._boot(spec, box)
            except BaseException:
                await asyncio.shield(destroy(box))
                raise

    async def attach(self, identity: str) -> Sandbox:
        check_identity(identity)
        box = SandboxFolder(self.root / identity)
        with contextlib.suppress(FileNotFoundError):  # another process killed it just now
            if box.ready:
                return self._adopt(box)
        raise NotFound(f"no {self.name} sandbox {identity!r} on this host")

    async def list(self, labels: Mapping[str, str] | None = None) -> Sequence[SandboxInfo]:
        if not self.root.is_dir():
            return []
        await asyncio.to_thread(self._clear_leftovers)
        paths = sorted(path for path in self.root.iterdir() if not path.name.startswith("."))
        found = [self._info(SandboxFolder(path)) for path in paths]
        wanted = (labels or {}).items()
        return [info for info in found if info is not None and wanted <= info.labels.items()]

    async def kill(self, identity: str) -> None:
        check_identity(identity)
        box = SandboxFolder(self.root / identity)
        async with locked(lock_of(box)):
            await destroy(box)

    # -- what differs by provider ---------------------------------------------------------------

    @abstractmethod
    def _handle(self, box: SandboxFolder, meta: SandboxMeta) -> HostSandbox: ...

    @abstractmethod
    async def _boot(self, spec: SandboxSpec, box: SandboxFolder) -> HostSandbox: ...

    # -- helpers ----------------------------------------------------------------------------------

    def _made_once(self, name: str, write: Callable[[Path], None]) -> Path:
        """The folder `name` that all sandboxes of this provider share, written on first use."""
        folder = self.root / name
        if not is_whole(folder):
            with (self.root / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not is_whole(folder):
                    draft = self.root / timestamped_name(DRAFT)
                    write(draft)
                    make_readable_by_sandboxes(draft)
                    publish_folder(draft, folder)
        return folder

    def _clear_leftovers(self) -> None:
        """Remove folders whose creator or remover was killed. No process ever ran in them."""
        for prefix in (DRAFT, REMOVAL_PREFIX):
            for path in self.root.glob(f"{prefix}*"):
                if age_of(path.name, prefix) > STALE_S:
                    shutil.rmtree(path, ignore_errors=True)

    def _adopt(self, box: SandboxFolder) -> HostSandbox:
        sandbox = self._handle(box, box.meta())
        if not sandbox.alive:
            raise SandboxLost(f"{self.name} sandbox {box.identity!r} is dead; boot a new one")
        return sandbox

    def _info(self, box: SandboxFolder) -> SandboxInfo | None:
        try:
            meta, expires = box.meta(), box.expires()
        except (FileNotFoundError, NotADirectoryError):
            return None  # a folder that all sandboxes share, or a sandbox killed just now
        return SandboxInfo(
            box.identity, self.name, box.alive, meta.created, expires, dict(meta.labels)
        )

    def _meta(
        self,
        spec: SandboxSpec,
        box: SandboxFolder,
        plan: cgroups.Plan,
        *,
        workdir: str,
        env: Mapping[str, str],
        enforced: Mapping[str, str],
        paths: Mapping[str, str] | None = None,
        farewell: tuple[str, ...] = (),
    ) -> SandboxMeta:
        return SandboxMeta(
            provider=self.name,
            identity=box.identity,
            created=time.time(),
            workdir=workdir,
            labels=dict(spec.labels),
            env=dict(env),
            output_mb=spec.limits.output_mb,
            disk_mb=spec.limits.disk_mb,
            open_files=self.settings.sandbox.open_files,
            groups=tuple(map(str, plan.folders)),
            exec_groups=str(plan.exec_groups) if plan.exec_groups else None,
            enforced=enforced,
            paths=paths or {},
            on_disk=not self.isolated or any(mount.writable for mount in spec.mounts),
            farewell=farewell,
        )
