"""One build of a Dockerfile: its context and network, and what a failure means.

The provider of the sandboxes builds, because it keeps the images. An image gets its name only when
it is complete and within its size limit, so an image with that name needs no check.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from perdure.errors import (
    Boundary,
    ControlPlaneError,
    InstanceError,
    PerdureError,
    RetryHere,
)
from perdure.instances import base_trees
from perdure.instances.package_index_hosts import how_to_allow, index_hosts
from perdure.sandboxes.base import Network
from perdure.sandboxes.host.forward_proxy import UnreachedHosts, forward_proxy, variables
from perdure.sandboxes.image_builds import (
    DOCKERFILE,
    PROXY_URL,
    BuildOutput,
    ImageBuild,
    ImageBuilder,
    draft_name_of,
)
from perdure.sandboxes.image_pulls import FULL_DISK, LIMIT_PASSES_S
from perdure.sandboxes.phase_specs import check_build_list
from perdure.storage.base import Store
from perdure.types import Instance, Limits

DOCKERFILE_ERRORS = re.compile(
    r"building at STEP|returned a non-zero code|did not complete successfully|failed to solve"
    r"|(COPY|ADD) failed|instruction|parse error|no FROM statement|no build stage"
    r"|invalid reference|image build for \S+ (failed|timed out)",
    re.IGNORECASE,
)
"""What the builders print for an error in the Dockerfile or in one of its commands."""
BUILDER_ERRORS = re.compile(
    r"cannot connect to the docker daemon|error during connect|unexpected EOF|connection reset"
    r"|code = Unavailable|OCI runtime error|runc create failed|toomanyrequests",
    re.IGNORECASE,
)
"""What they print when they, or the engine, fail."""


@dataclass(frozen=True)
class BuildPlace:
    """Where one build works, and what it may use."""

    folder: Path
    """For the build context; it does not exist yet."""
    log: Path
    socket: Path
    """Where to open the proxy to the package index."""
    lock: int
    """Descriptor of the image's lock."""
    limits: Limits
    sandbox_limits: Limits
    """Limits of the sandboxes that boot the image."""
    network: Network
    allowed_hosts: Sequence[str]
    """Of Network.LISTED: the build reaches them besides the package index."""
    build_hosts: str


async def build_image(
    instance: Instance, builder: ImageBuilder, store: Store, place: BuildPlace
) -> None:
    """Build the image of the instance's Dockerfile.

    Raises: InstanceError (the Dockerfile fails, takes too long or makes too large an image: the
    message has its last lines and the log's path); RetryHere (the builder, the network or the disk
    fails); ConfigurationError; NotFound (no such context)."""
    ref, build, image = instance.ref, instance.environment.build, instance.environment.image
    if build is None or build.key is None or image is None:
        raise InstanceError(f"{ref}: `environment.build` has no stored context: import it again")
    archive = (await store.get(build.key)).data
    await asyncio.to_thread(base_trees.unpack, archive, place.folder)
    text = await asyncio.to_thread(_dockerfile, ref, place.folder)
    async with _index_access(text, builder, place) as (proxy, asked):
        output = await builder.build_image(
            ImageBuild(
                image=image,
                context=place.folder,
                limits=place.limits,
                sandbox_limits=place.sandbox_limits,
                timeout_s=build.timeout_s,
                network=place.network,
                proxy=proxy,
                variables=variables(PROXY_URL) if proxy else {},
                log=place.log,
                lock=place.lock,
            )
        )
    if output.code != 0:
        raise _failure(ref, output, build.timeout_s, asked, place, has_proxy=proxy is not None)
    await _publish(ref, image, builder, place.limits)


async def _publish(ref: str, image: str, builder: ImageBuilder, limits: Limits) -> None:
    """Give the image its name. Raises: InstanceError if it is too large."""
    size = await builder.image_size(draft_name_of(image))
    if size is None:
        raise ControlPlaneError(f"the image of {ref} vanished after its build")
    if size > limits.disk_mb << 20:
        await builder.remove_image(draft_name_of(image))
        raise InstanceError(
            f"{ref}: the image of its Dockerfile has {size >> 20} MB, more than "
            f"phases.environment.limits.disk_mb = {limits.disk_mb}"
        )
    await builder.rename_image(draft_name_of(image), image)


@asynccontextmanager
async def _index_access(
    dockerfile: str, builder: ImageBuilder, place: BuildPlace
) -> AsyncIterator[tuple[Path | None, UnreachedHosts]]:
    """The proxy to the package index and the listed hosts, if the build can and may use it.

    Raises: ConfigurationError for a list of hosts if the builder can use no proxy."""
    if place.network is Network.LISTED:
        check_build_list(builder)
    if place.network not in (Network.INDEX, Network.LISTED) or not builder.has_build_proxy:
        yield None, UnreachedHosts()
        return
    hosts = index_hosts(dockerfile.splitlines(), place.build_hosts, place.allowed_hosts)
    async with forward_proxy(place.socket, hosts) as asked:
        yield place.socket, asked


def _dockerfile(ref: str, folder: Path) -> str:
    try:
        return (folder / DOCKERFILE).read_text(errors="replace")
    except OSError as error:
        raise InstanceError(f"{ref}: its build context has no {DOCKERFILE}") from error


def _failure(
    ref: str,
    output: BuildOutput,
    timeout_s: float,
    asked: UnreachedHosts,
    place: BuildPlace,
    *,
    has_proxy: bool,
) -> PerdureError:
    """The error of a failed build. If a host was unreachable, that may be why the command
    failed."""
    how = "took too long" if output.code is None else f"exit code {output.code}"
    told = f"{ref}: the build of its Dockerfile failed ({how}); log: {place.log}\n{output.tail}"
    words = output.tail.lower()
    if any(said in words for said in FULL_DISK):
        return ControlPlaneError(told, retry_after=LIMIT_PASSES_S)
    if asked.unreachable:
        return RetryHere(told, boundary=Boundary.INSTANCE)
    if output.code is None:
        return InstanceError(
            f"{ref}: the build of its Dockerfile took more than `build_timeout_sec` = "
            f"{timeout_s:g} s; log: {place.log}\n{output.tail}"
        )
    is_dockerfile_error = output.code > 0 and DOCKERFILE_ERRORS.search(output.tail)
    if not is_dockerfile_error or BUILDER_ERRORS.search(output.tail):
        return ControlPlaneError(told)
    if asked.refused:
        return InstanceError(f"{how_to_allow(sorted(asked.refused))}; {told}")
    if not has_proxy and place.network is not Network.HOST:
        told += "\nThe build had no network; phases.environment.network=host gives it one"
    return InstanceError(told)
