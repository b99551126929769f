"""One build of a Dockerfile by Daytona's builder, through the SDK: a snapshot of the account.

The snapshot's name is made from the image's and is unique in the account, so of two hosts that build an
image one gets a conflict, and follows the other's build.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.errors import ControlPlaneError, InstanceError
from perdure.sandboxes.docker_ignore import remove_ignored
from perdure.sandboxes.guest.service_image_builds import ServiceBuild, failed
from perdure.sandboxes.image_builds import (
    DOCKERFILE,
    REPOSITORY,
    BuildOutput,
    ImageBuild,
    instructions,
    last_lines,
)
from perdure.sandboxes.providers.daytona.daytona_client import client

if TYPE_CHECKING:
    from daytona import Image, Resources
    from daytona.common.snapshot import Snapshot

    from perdure.types import Limits

Call = Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Repeats a call that fails for a passing reason."""

POLL_S = 0.5
LEAST_DISK_GIB = 3
"""The service's default. The image needs disk too."""
FAILED = ("error", "build_failed")


@dataclass
class SnapshotBuild:
    """The build of one snapshot, over several calls."""

    name: str
    image: "Image"
    resources: "Resources"
    log: list[str] = field(default_factory=list)
    is_followed: bool = False
    """Whether the snapshot's state is that of this build, and not the end of an earlier one."""

    async def ended(self) -> "Snapshot":
        """The snapshot in its final state. Raises: the SDK's errors; ControlPlaneError if it is
        being removed, or another host is creating it; InstanceError if the build context lacks a file."""
        service = await client()
        snapshot = await self._found()
        while snapshot is not None and (state := _state(snapshot)) != "active":
            if state == "removing" or (state in FAILED and not self.is_followed):
                if state in FAILED:
                    await service.snapshot.delete(snapshot)
                raise ControlPlaneError(f"Daytona: snapshot {self.name} is being removed")
            if state in FAILED:
                return snapshot
            if state == "inactive":  # Daytona deactivates what was not used for two weeks
                await service.snapshot.activate(snapshot)
            self.is_followed = True
            await asyncio.sleep(POLL_S)
            snapshot = await self._found()
        return snapshot or await self._made()

    async def _found(self) -> "Snapshot | None":
        from daytona import DaytonaNotFoundError

        try:
            return await (await client()).snapshot.get(self.name)
        except DaytonaNotFoundError:
            return None

    async def _made(self) -> "Snapshot":
        from daytona import CreateSnapshotParams, DaytonaConflictError, DaytonaError

        params = CreateSnapshotParams(name=self.name, image=self.image, resources=self.resources)
        self.is_followed, self.log = True, []
        try:
            return await (await client()).snapshot.create(params, on_logs=self.log.append)
        except DaytonaConflictError as error:
            raise ControlPlaneError(f"Daytona: {error}") from error
        except DaytonaError as error:
            if "Path does not exist" in str(error):
                raise InstanceError(f"COPY failed: {error}") from error
            snapshot = await self._found() if ", reason: " in str(error) else None
            if snapshot is None or _state(snapshot) not in FAILED:
                raise
            return snapshot


async def run_build(build: ImageBuild, call: Call) -> ServiceBuild:
    """Follow the build of this image, or start one. Raises: ControlPlaneError if Daytona gave it up;
    the errors of `call`."""
    await client()
    from daytona import DaytonaError

    try:
        image = await asyncio.to_thread(_image, build.context)
    except (ValueError, OSError, DaytonaError) as error:
        return failed(f"parse error for Daytona's builder: {error}")
    name = snapshot_name(build.image)
    one = SnapshotBuild(name, image, resources(build.sandbox_limits))
    try:
        snapshot = await call("build", one.ended)
    except InstanceError as error:
        return failed(str(error))
    tail = last_lines("\n".join(one.log))
    if _state(snapshot) == "active":
        return ServiceBuild(name, BuildOutput(0, tail))
    reason = snapshot.error_reason or "no reason given"
    await call("delete snapshot", lambda: remove_snapshot(name))
    return failed(f"{tail}\n{reason}".strip())


def snapshot_name(image: str) -> str:
    return f"perdure-build-{image.removeprefix(f'{REPOSITORY}:')}"


async def remove_snapshot(name: str) -> bool:
    """Delete it, and end its build. False: there is none. Raises: the SDK's errors."""
    from daytona import DaytonaNotFoundError

    try:
        await (await client()).snapshot.delete(name)
    except DaytonaNotFoundError:
        return False
    return True


def resources(limits: "Limits") -> "Resources":
    from daytona import Resources

    return Resources(
        cpu=math.ceil(limits.cpus),
        memory=math.ceil(limits.memory_mb / 1024),
        disk=max(LEAST_DISK_GIB, math.ceil(limits.disk_mb / 1024)),
    )


def _state(snapshot: "Snapshot") -> str:
    return str(snapshot.state.value)


def _image(context: Path) -> "Image":
    """The Dockerfile with what its `COPY` lines name. Raises: ValueError for what the SDK would leave
    out; OSError; DaytonaError for a file outside the context."""
    from daytona import Image

    remove_ignored(context)
    for path in context.rglob("*"):
        if not path.exists():
            raise ValueError(f"{path.relative_to(context)} is a symbolic link to nothing")
    for line in instructions((context / DOCKERFILE).read_text()):
        words = [word for word in line.split() if not word.startswith("--")]
        if words[:1] and words[0].upper() == "ADD" and "://" not in line and "<<" not in line:
            raise ValueError(f"ADD of files is not supported; use COPY: {line}")
    return Image.from_dockerfile(context / DOCKERFILE, strict_context=True)
