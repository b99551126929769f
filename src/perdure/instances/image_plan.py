"""Finds before a run which of its images are missing, and how many bytes they will download.

Sizes come from registries, in bounded time. A size that no registry reports is unknown, never 0.
"""

import asyncio
import io
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from perdure.errors import NotFound
from perdure.instances.image_preparation import ImageNeed, images_of
from perdure.sandboxes import image_names
from perdure.sandboxes.base import SandboxProvider
from perdure.sandboxes.image_builds import (
    DOCKERFILE,
    LocalImageBuilder,
    base_images,
    qualified_name,
)
from perdure.sandboxes.registry_client import HUB, Layer, RegistryClient, RegistryFailed, chains
from perdure.storage.base import Store
from perdure.types import Instance, RolloutRequest

REQUESTS_AT_ONCE = 8
MOST_OF_HUB = 20
"""Most images to ask Docker Hub about, which counts each request as a pull and allows few per hour."""
UNREAD = "a Dockerfile cannot be read"
NAMED = 3
"""Instances that the text names."""


class Bounds(NamedTuple):
    """How long a plan may take, and about how many images it may ask."""

    seconds: float
    images: int


AT_START = Bounds(5.0, 50)
BEFORE_START = Bounds(60.0, 1000)
"""For `--dry-run` and `perdure images prepare`."""


@dataclass(frozen=True)
class ImagePlan:
    """The images that a run needs at one sandbox provider.

    Example: ImagePlan("podman", 3, here=1, disk_bytes=90_000_000, to_pull=["python:3.11"], to_build=["made/one"],
    downloads_to="this host", asked=2, download_bytes=51_000_000)
    """

    provider: str
    images: int
    here: int | None
    """None: the provider does not tell."""
    disk_bytes: int | None
    """Of those that are here; layers that they share count for each. None: unknown."""
    to_pull: Sequence[str]
    """Images; all of them if `here` is None."""
    to_build: Sequence[str]
    """For each image, the first instance that needs it."""
    downloads_to: str
    """Empty: a service pulls images and base images, so nothing was asked."""
    preparable: int = 0
    """How many of the missing images `perdure images prepare` gets."""
    asked: int = 0
    """Images and base images whose size a registry told."""
    download_bytes: int | None = None
    """Compressed bytes of these. Shared layers count once. Layers that are known to be here do not
    count. None: unknown."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Reason -> images and base images whose size is unknown."""

    def lines(self) -> list[str]:
        """The plan as text. Empty if the run needs no image."""
        if not self.images:
            return []
        found = [f"images for {self.provider}: {', '.join(self._counts())}"]
        if not self.downloads_to:
            if self.to_build:
                named = [*dict.fromkeys(self.to_build)]
                more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
                found.append(
                    f"  {self.provider} charges for builds; to build: {', '.join(named[:NAMED])}{more}"
                )
            return found
        if self.asked and self.download_bytes is not None:
            least = "at least " if self.unknown else ""
            of = f"{self.asked} of {self.asked + sum(self.unknown.values())} images and base images"
            also = ", without what RUN lines download" if self.to_build else ""
            found.append(
                f"  download to {self.downloads_to}: {least}{_shown(self.download_bytes)} compressed, for "
                f"{of}{also}"
            )
        found += [f"  download unknown for {count}: {why}" for why, count in self.unknown.items()]
        return found

    def _counts(self) -> Iterable[str]:
        if self.here is None:
            yield f"{self.images} needed, and which of them are there is unknown"
            return
        size = f" (at most {_shown(self.disk_bytes)} on disk)" if self.disk_bytes else ""
        where = "here" if self.downloads_to else "known to this host"
        yield f"{self.here} of {self.images} {where}{size}"
        if self.to_pull and self.downloads_to:
            yield f"{len(self.to_pull)} to pull"
        elif self.to_pull:
            yield f"{len(self.to_pull)} that the service must have or pull, which is not checked"
        if self.to_build:
            yield f"{len(self.to_build)} to build"


async def plan_images(
    instances: Sequence[Instance],
    provider: SandboxProvider,
    request: RolloutRequest,
    store: Store,
    *,
    bounds: Bounds,
    mirror: str,
) -> ImagePlan:
    """`mirror`: as in `image_names.mirrored`. Raises: RetryHere if the provider does not answer."""
    wanted = images_of(instances, provider, request)
    here = await provider.images_here(wanted)
    missing = {name: need for name, need in wanted.items() if name not in (here or ())}
    to_pull = [name for name, need in missing.items() if not need.is_built]
    builds = [need for need in missing.values() if need.is_built]
    question = _Question(provider, store, mirror, bounds)
    if provider.downloads_to and missing:
        await question.ask(to_pull, builds)
    is_silent = bool(question.answers) or (bool(missing) and not provider.downloads_to)
    known = [answer for answer in question.answers.values() if not isinstance(answer, str)]
    layers = {layer.digest: layer for image in known for layer in image}.values()
    return ImagePlan(
        provider=provider.name,
        images=len(wanted),
        here=None if here is None else len(here),
        disk_bytes=sum(here.values()) if here is not None and all(here.values()) else None,
        to_pull=to_pull,
        to_build=[need.instance.ref for need in builds],
        downloads_to=provider.downloads_to,
        preparable=sum(need.is_preparable_by(provider) for need in missing.values()),
        asked=len(known),
        download_bytes=(
            None
            if is_silent and not known
            else sum(one.size for one in layers if one.chain not in question.here)
        ),
        unknown=dict(
            Counter(answer for answer in question.answers.values() if isinstance(answer, str))
        ),
    )


def _shown(size: int) -> str:
    """Example: _shown(1_234_567_890) -> "1.23 GB"."""
    return f"{size / 1e9:,.2f} GB" if size >= 10**8 else f"{size / 1e6:,.2f} MB"


class _Question:
    """Finds the layers of images and of the base images of Dockerfiles."""

    def __init__(
        self, provider: SandboxProvider, store: Store, mirror: str, bounds: Bounds
    ) -> None:
        self._provider, self._store = provider, store
        self._mirror, self._bounds = mirror, bounds
        self._down: dict[str, str] = {}
        """Registry -> why it is not asked any more."""
        self._slots = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self.here: frozenset[str] = frozenset()
        """The chains of layers that are here."""
        self.answers: dict[str, Sequence[Layer] | str] = {}
        """Image, or Dockerfile that was not read -> its layers, or why they are unknown."""

    async def ask(self, to_pull: Sequence[str], builds: Sequence[ImageNeed]) -> None:
        """Get the answers that come in time."""
        late = f"no answer within {self._bounds.seconds:g} s"
        pulled = dict.fromkeys((self._pulled_name(name) for name in to_pull), late)
        dockerfiles = {f"Dockerfile {number}": need for number, need in enumerate(builds)}
        self.answers = {**pulled, **dict.fromkeys(dockerfiles, late)}
        with suppress(TimeoutError):
            async with asyncio.timeout(self._bounds.seconds):
                if isinstance(self._provider, LocalImageBuilder):
                    local = await self._provider.local_layers()
                    self.here = frozenset(chain for layers in local for chain in chains(layers))
                bases: dict[str, None] = {}
                for key, need in dockerfiles.items():
                    if (names := await self._base_images(need)) is None:
                        self.answers[key] = UNREAD
                    else:
                        del self.answers[key]
                        bases |= dict.fromkeys(names)
                here = await self._provider.images_here(bases) or ()
                for name in bases:
                    if name not in here:
                        self.answers.setdefault(self._pulled_name(name), late)
                await self._ask_registries()

    def _pulled_name(self, name: str) -> str:
        return qualified_name(image_names.mirrored(name, self._mirror))

    async def _base_images(self, need: ImageNeed) -> Sequence[str] | None:
        """None if the Dockerfile cannot be read."""
        build = need.instance.environment.build
        try:
            archive = (await self._store.get((build and build.key) or "")).data
            return base_images(await asyncio.to_thread(_dockerfile, archive))
        except (NotFound, OSError, EOFError, LookupError, tarfile.TarError):
            return None

    async def _ask_registries(self) -> None:
        try:
            import httpx
        except ModuleNotFoundError:
            self.answers = dict.fromkeys(self.answers, "install httpx to ask registries")
            return
        most, of_hub = self._bounds.images, MOST_OF_HUB
        chosen = []
        for name, answer in self.answers.items():
            if answer == UNREAD:
                continue
            is_hub = image_names.registry_of(name) == HUB
            if most and (of_hub or not is_hub):
                chosen.append(name)
                most, of_hub = most - 1, of_hub - is_hub
            elif is_hub and not of_hub:
                self.answers[name] = (
                    f"only {MOST_OF_HUB} are asked about at {HUB}, which counts them as pulls"
                )
            else:
                self.answers[name] = f"only the first {self._bounds.images} are asked about"
        async with httpx.AsyncClient(follow_redirects=True) as http:
            client = RegistryClient(http)
            await asyncio.gather(*(self._ask(client, name) for name in chosen))

    async def _ask(self, client: RegistryClient, name: str) -> None:
        registry = image_names.registry_of(name)
        async with self._slots:
            if registry in self._down:
                self.answers[name] = self._down[registry]
                return
            try:
                self.answers[name] = await client.layers(name, with_chains=bool(self.here))
            except RegistryFailed as error:
                self.answers[name] = str(error)
                if error.is_down:
                    self._down[registry] = str(error)


def _dockerfile(archive: bytes) -> str:
    """The Dockerfile in a build context. Raises: LookupError, OSError, EOFError, TarError."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        file = tar.extractfile(DOCKERFILE)
        return file.read().decode(errors="replace") if file else ""
