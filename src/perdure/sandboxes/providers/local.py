"""The `local` provider: no isolation, for hosts where bubblewrap cannot be installed.

Commands run as you, on your files, with your network. In argv, env, cwd and file paths, the spec's
workdir and mount targets are replaced by their host paths.
"""

import asyncio
import contextlib
import errno
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import structlog

from perdure.errors import ConfigurationError
from perdure.sandboxes.agent_user import SYSTEM_PATH
from perdure.sandboxes.base import ExecStatus, Network, SandboxProvider, SandboxSpec
from perdure.sandboxes.host import cgroups
from perdure.sandboxes.host.host_sandbox import HostSandbox
from perdure.sandboxes.host.keeper.full_disk import is_full
from perdure.sandboxes.host.keeper_client import start_keeper
from perdure.sandboxes.host.provider import HostProvider
from perdure.sandboxes.host.sandbox_folder import SandboxFolder, SandboxMeta
from perdure.sandboxes.host.untrusted_files import read_file, write_file
from perdure.types import Limits

log = structlog.get_logger()

OWN_FOLDERS = ("tree", "home", "tmp")
"""Folders that commands write to, in the sandbox's folder."""


class LocalSandbox(HostSandbox):
    """A folder and a keeper. `workdir` is the real folder, not the path that the spec names."""

    def __init__(self, box: SandboxFolder, meta: SandboxMeta) -> None:
        super().__init__(box, meta)
        self.tmp = str(box.path / "tmp")

    @cached_property
    def _named(self) -> re.Pattern[str]:
        longest_first = sorted(self.meta.paths, key=len, reverse=True)
        return re.compile(
            rf"(?<![\w./~-])({'|'.join(map(re.escape, longest_first))})(?![\w.-])", re.ASCII
        )

    def _real(self, text: str) -> str:
        return self._named.sub(lambda match: self.meta.paths[match[1]], text)

    def _argv(self, argv: Sequence[str]) -> Sequence[str]:
        return [self._real(part) for part in argv]

    def _folder(self, cwd: str | None) -> str | None:
        return str(self._host_path(cwd or "."))

    def _environment(self, env: Mapping[str, str]) -> Mapping[str, str]:
        return {name: self._real(value) for name, value in env.items()}

    async def poll(self, exec_id: str) -> ExecStatus:
        """A sandbox that uses more than its share may have filled the disk itself."""
        status = await super().poll(exec_id)
        if status.host_lacked == "disk" and await asyncio.to_thread(self._exceeds_its_share):
            return replace(status, host_lacked="")
        return status

    def _exceeds_its_share(self) -> bool:
        used, most = 0, self.meta.disk_mb << 20
        for start in OWN_FOLDERS:
            for folder, _, names in os.walk(self.box.path / start):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        used += os.lstat(f"{folder}/{name}").st_blocks * 512
                if used > most:
                    return True
        return False

    def _host_path(self, path: str) -> Path:
        return Path(self.workdir) / self._real(path)

    async def put(self, path: str, data: bytes | Path, *, mode: int = 0o644) -> None:
        self._check_alive()
        await write_file(Path("/"), str(self._host_path(path)), data, mode)

    async def get(self, path: str, offset: int = 0, limit: int | None = None) -> bytes:
        self._check_alive()
        return await read_file(Path("/"), str(self._host_path(path)), offset, limit)


class LocalProvider(HostProvider):
    """Copies the tree into a folder and runs there. For trusted agents on your own machine."""

    name = "local"
    isolated = False
    limits = SandboxProvider.limits - {"disk_mb"}
    networks = frozenset({Network.HOST})

    def check(self) -> Sequence[str]:
        if self.settings.sandbox.allow_local:
            return []
        return [
            "sandbox local does not isolate: commands run as you, with your files and network; "
            "set PERDURE_SANDBOX__ALLOW_LOCAL=true if you trust the agent and the rows, or use "
            "bubblewrap"
        ]

    async def _boot(self, spec: SandboxSpec, box: SandboxFolder) -> LocalSandbox:
        for refusal in self.check():
            raise ConfigurationError(refusal)
        _check_room(box)
        log.warning(
            "sandbox without isolation: agent code runs as you, with your files and network",
            provider=self.name,
            identity=box.identity,
        )
        plan = cgroups.plan(box.path, spec.limits)
        meta = self._meta(
            spec,
            box,
            plan,
            workdir=str(box.path / "tree"),
            env={**_environment(box), **spec.env},
            enforced=_enforced(plan, spec.limits),
            paths=_paths(spec, box),
        )
        box.create_folder(meta, spec.ttl_s)
        for name in OWN_FOLDERS[1:]:
            (box.path / name).mkdir()
        await asyncio.to_thread(_copy_tree, spec.tree, box.path / "tree")
        gateway = None if spec.gateway is None else (0, spec.gateway)
        await start_keeper(box, plan, gateway=gateway)
        return self._handle(box, meta)

    def _handle(self, box: SandboxFolder, meta: SandboxMeta) -> LocalSandbox:
        return LocalSandbox(box, meta)


def _environment(box: SandboxFolder) -> Mapping[str, str]:
    return {
        "HOME": str(box.path / "home"),
        "LANG": "C.UTF-8",
        "PATH": SYSTEM_PATH,
        "TMPDIR": str(box.path / "tmp"),
    }


def _paths(spec: SandboxSpec, box: SandboxFolder) -> dict[str, str]:
    paths = {spec.workdir: str(box.path / "tree")}
    for mount in spec.mounts:
        if not mount.source.exists():
            raise ConfigurationError(f"mount source {str(mount.source)!r} does not exist")
        paths[mount.target] = str(mount.source)
    return paths


def _enforced(plan: cgroups.Plan, limits: Limits) -> Mapping[str, str]:
    fallback = {
        "memory": f"prlimit --data={limits.memory_mb << 20}",
        "pids": "none",
        "cpu": "none",
        "disk": "none",
        "output": "watched",
    }
    return {**fallback, **plan.enforced}


def _copy_tree(tree: Path | None, target: Path) -> None:
    if tree is None:
        target.mkdir()
        return
    try:
        shutil.copytree(tree, target, symlinks=True)
    except shutil.Error as error:  # it lists the errors of many files
        if f"[Errno {errno.ENOSPC}]" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target)) from None


def _check_room(box: SandboxFolder) -> None:
    """Raises: OSError when the disk is full, because commands there would fail at their writes."""
    box.path.parent.mkdir(parents=True, exist_ok=True)
    if is_full(str(box.path.parent)):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(box.path.parent))
