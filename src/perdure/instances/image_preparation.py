"""Pulls or builds the images of many instances before a run, and removes those that no run uses."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure.errors import PerdureError
from perdure.instances.environment_builder import LAST_USES, Environments
from perdure.sandboxes import image_names
from perdure.sandboxes.base import Network, SandboxProvider
from perdure.sandboxes.image_builds import REPOSITORY, LocalImageBuilder, qualified_name
from perdure.types import Instance, Limits, SourceKind


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


def images_of(instances: Sequence[Instance], provider: SandboxProvider) -> Mapping[str, Instance]:
    """Image that the provider uses -> the first instance that needs it, with that environment."""
    found: dict[str, Instance] = {}
    for instance in instances:
        for environment in instance.environments:
            if instance.source.kind is SourceKind.IMAGE and (image := environment.image):
                needs = instance.model_copy(update={"environment": environment})
                found.setdefault(provider.image_used_for(image), needs)
    return found


async def missing_images(
    instances: Sequence[Instance], builder: LocalImageBuilder, mirror: str
) -> Mapping[str, Instance]:
    """The images of these instances that are not here. `mirror`: as in `image_names.mirrored`."""
    wanted = images_of(instances, builder)
    here = await builder.local_images() if wanted else ()
    return {
        image: instance
        for image, instance in wanted.items()
        if not {qualified_name(image), qualified_name(image_names.mirrored(image, mirror))}
        & {*here}
    }


async def prepare_all(
    instances: Sequence[Instance],
    environments: Environments,
    builder: LocalImageBuilder,
    *,
    limits: Limits,
    network: Network,
    jobs: int,
) -> AsyncIterator[PreparedImage]:
    """Yield each image once it is done, even if others fail. An image that is here costs one
    check."""
    slots = asyncio.Semaphore(jobs)

    async def one(image: str, instance: Instance) -> PreparedImage:
        async with slots:
            started = time.monotonic()
            try:
                was_here = await builder.image_size(image) is not None
                await environments.prepare_image(instance, builder, limits=limits, network=network)
                size = await builder.image_size(image) or 0
            except PerdureError as error:
                return PreparedImage(image, instance.ref, "", problem=str(error))
        made = "built" if instance.environment.build is not None else "pulled"
        seconds = time.monotonic() - started
        return PreparedImage(image, instance.ref, "here" if was_here else made, size, seconds)

    tasks = [asyncio.create_task(one(*pair)) for pair in images_of(instances, builder).items()]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def prune(home: Path, builders: Sequence[LocalImageBuilder], *, unused_s: float) -> list[str]:
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
