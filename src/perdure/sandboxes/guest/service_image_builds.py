"""Builds of Dockerfiles by a service's own builder, which keeps the images in the account.

A provider starts the build or finds it. This module enforces the time limit, and records which images
of the account this host knows.
"""

import asyncio
import math
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from perdure.errors import Boundary, ConfigurationError, RetryHere
from perdure.sandboxes.base import Network, SandboxSpec
from perdure.sandboxes.guest.service_provider import SdkProvider
from perdure.sandboxes.image_builds import (
    REPOSITORY,
    BuildOutput,
    ImageBuild,
    ImageBuilder,
    draft_name_of,
)
from perdure.types import Limits


class ServiceBuild(NamedTuple):
    """How a build ended. `image_id` names the image in the account; empty if the build failed."""

    image_id: str
    output: BuildOutput


class ServiceImageBuilder(SdkProvider, ImageBuilder):
    """A known image costs no call. If the record of an image is lost, the builder finds the image."""

    @abstractmethod
    async def _build(self, build: ImageBuild) -> ServiceBuild:
        """Build the image, join a build of it, or find it. Raises: any error of calling the service."""

    @abstractmethod
    async def _end_late_build(self, build: ImageBuild) -> str:
        """What to tell about a build that exceeded its time limit. The builder stops it if it can.

        Raises: ControlPlaneError if the service does not answer: then the Dockerfile is not at fault.
        """

    async def image_size(self, name: str) -> int | None:
        """0 if this host has a record of the image: the services tell no size."""
        return 0 if self._record(name).exists() else None

    async def images_here(self, names: Collection[str]) -> Mapping[str, int]:
        return {name: 0 for name in names if self._record(name).exists()}

    async def build_image(self, build: ImageBuild) -> BuildOutput:
        if build.network is Network.NONE:
            raise ConfigurationError(
                f"phases.environment.network: builds of {self.name} reach the internet; set it to "
                "'host', or use --sandbox podman"
            )
        try:
            async with asyncio.timeout(build.timeout_s):
                image_id, output = await self._build(build)
        except TimeoutError:
            image_id, output = "", BuildOutput(None, await self._end_late_build(build))
        build.log.write_text(output.tail)
        if image_id:
            record = self._record(draft_name_of(build.image))
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(image_id)
        return output

    async def rename_image(self, name: str, new: str) -> None:
        self._record(name).replace(self._record(new))

    def _forget(self, name: str) -> None:
        self._record(name).unlink(missing_ok=True)

    def _record(self, name: str) -> Path:
        """The file with the id of a built image in this account."""
        return self.root / "images" / self.account / name.removeprefix(f"{REPOSITORY}:")

    def _built_image(self, spec: SandboxSpec) -> str:
        """The name of the built image that a sandbox of this spec boots; empty if it boots another."""
        image = spec.image if spec.tree is None else None
        if image is None or not re.fullmatch(rf"{REPOSITORY}:[\w-]+", image):
            return ""  # rows name images, and the name becomes that of a file
        return self.sized_image(image, spec.limits)

    def _image_id(self, name: str) -> str:
        """Raises: RetryHere if this host does not know the image."""
        try:
            return self._record(name).read_text()
        except FileNotFoundError:
            raise self._not_built(name) from None

    def _not_built(self, name: str) -> RetryHere:
        """The next try prepares the environment again, and so builds the image."""
        return RetryHere(
            f"the {self.name} account lacks the built image {name}", boundary=Boundary.INSTANCE
        )


def failed(said: str) -> ServiceBuild:
    return ServiceBuild("", BuildOutput(1, said))


def with_size(image: str, limits: Limits) -> str:
    """The name of an image that has the CPUs, memory and disk of its sandboxes.

    Example: with_size("localhost/perdure-build:3f1c", Limits()) -> "localhost/perdure-build:3f1c-2-4096-2048"
    """
    return f"{image}-{math.ceil(limits.cpus)}-{limits.memory_mb}-{limits.disk_mb}"
