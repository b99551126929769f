"""Pulls or builds the images of many instances before a run, and removes those that no run uses."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from perdure.errors import PerdureError
from perdure.instances.environment_builder import LAST_USES, Environments
from perdure.sandboxes import phase_specs
from perdure.sandboxes.base import SandboxProvider
from perdure.sandboxes.image_builds import (
    REPOSITORY,
    ImageBuilder,
    LocalImageBuilder,
)
from perdure.types import (
    Environment,
    Instance,
    Limits,
    PhaseName,
    RolloutRequest,
    SourceKind,
)


@dataclass(frozen=True)
class PreparedImage:
    """What became of one image."""

    image: str
    instance: str
    """The first instance that needs it."""
    done: str
    """`here`, `pulled` or `built`; empty if it failed."""
    size: int = 0
    """Bytes."""
    seconds: float = 0.0
    problem: str = ""


class ImageNeed(NamedTuple):
    """An instance with the environment whose image it needs, and the limits of its sandboxes."""

    instance: Instance
    limits: Limits
    is_built: bool
    """From a Dockerfile; otherwise it is pulled."""

    def is_preparable_by(self, provider: SandboxProvider) -> bool:
        """Whether `prepare_all` gets the image. A service pulls images by itself."""
        return self.is_built or isinstance(provider, LocalImageBuilder)


def images_of(
    instances: Sequence[Instance], provider: SandboxProvider, request: RolloutRequest
) -> Mapping[str, ImageNeed]:
    """Image that the provider uses -> the first need of it."""
    found: dict[str, ImageNeed] = {}
    for instance in instances:
        if instance.source.kind is not SourceKind.IMAGE:
            continue
        for phase, environments in _environments_by_phase(instance):
            place = phase_specs.place(request, instance, phase)
            if place.provider != provider.name:
                continue
            for environment in environments:
                if not (image := environment.image):
                    continue
                used = provider.image_used_for(image)
                is_built = environment.build is not None and used == image
                if is_built and isinstance(provider, ImageBuilder):
                    used = provider.sized_image(image, place.limits)
                needs = instance.model_copy(update={"environment": environment})
                found.setdefault(used, ImageNeed(needs, place.limits, is_built))
    return found


def _environments_by_phase(
    instance: Instance,
) -> "Sequence[tuple[PhaseName, Sequence[Environment]]]":
    verifier = instance.grading.verifier
    own = instance.environment.containers
    return ("agent", own), ("grade", verifier.environment.containers if verifier else own)


async def prepare_all(
    instances: Sequence[Instance],
    environments: Environments,
    builder: ImageBuilder,
    request: RolloutRequest,
    *,
    jobs: int,
) -> AsyncIterator[PreparedImage]:
    """Yield each image once it is done, even if others fail. An image that is here costs one
    check."""
    slots, build = asyncio.Semaphore(jobs), phase_specs.place(request, None, "environment")

    async def one(image: str, need: ImageNeed) -> PreparedImage:
        instance = need.instance
        async with slots:
            started = time.monotonic()
            try:
                was_here = await builder.image_size(image) is not None
                await environments.prepare_image(
                    instance,
                    limits=build.limits,
                    network=build.network,
                    allowed_hosts=build.allowed_hosts,
                    sandbox_limits=need.limits,
                )
                size = await builder.image_size(image) or 0
            except PerdureError as error:
                return PreparedImage(image, instance.ref, "", problem=str(error))
        made = "built" if need.is_built else "pulled"
        seconds = time.monotonic() - started
        return PreparedImage(image, instance.ref, "here" if was_here else made, size, seconds)

    tasks = [
        asyncio.create_task(one(image, need))
        for image, need in images_of(instances, builder, request).items()
        if need.is_preparable_by(builder)
    ]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def prune(home: Path, builders: Sequence[ImageBuilder], *, unused_s: float) -> list[str]:
    """Remove the images that Perdure built here and no rollout has used for `unused_s` seconds.
    Returns their names. An image that a sandbox uses stays. One that none of `builders` has keeps its
    record, because another engine may have it."""
    removed = []
    for use in sorted((home / "environments" / LAST_USES).glob("*")):
        if time.time() - use.stat().st_mtime < unused_s:
            continue
        image = f"{REPOSITORY}:{use.name}"
        having = [one for one in builders if await one.image_size(image) is not None]
        if having and all([await one.remove_image(image) for one in having]):
            use.unlink(missing_ok=True)
            removed.append(image)
    return removed
