"""Images built from a Dockerfile: names, base images, limits, and the run of a build on this host.

`docker`, `podman`, `modal`, `e2b` and `daytona` run the builds. `perdure.instances.dockerfile_builds`
decides when.
"""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perdure.sandboxes import image_names
from perdure.sandboxes.base import Network, SandboxProvider
from perdure.sandboxes.host import build_supervisor
from perdure.sandboxes.host.forward_proxy import PROXY_PORT
from perdure.settings.settings_tree import Settings
from perdure.types import Limits

REPOSITORY = "localhost/perdure-build"
DOCKERFILE = "Dockerfile"
PROXY_URL = f"http://127.0.0.1:{PROXY_PORT}"
MOST_COMPARED = 200
TAIL_LINES = 15
TAIL_BYTES = 1 << 16
_ARG = re.compile(r"^ARG\s+(.*)", re.IGNORECASE)
_FROM = re.compile(r"^FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?", re.IGNORECASE)
_OTHER_IMAGE = re.compile(
    r"^(?:(?:COPY|ADD)\s+(?:--\S+\s+)*?--from=|RUN\s+(?:--\S+\s+)*?--mount=\S*?\bfrom=)([^\s,]+)",
    re.IGNORECASE,
)
_HEREDOC = re.compile(r"^(?:RUN|COPY|ADD)\s(?:.*\s)?\d*<<-?([\"']?)(\w+)\1", re.IGNORECASE)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")


@dataclass(frozen=True)
class ImageBuild:
    """One build of a Dockerfile."""

    image: str
    context: Path
    """A folder with `Dockerfile` at its top."""
    limits: Limits
    sandbox_limits: Limits
    """Limits of the sandboxes that boot the image. Some services fix them with the image."""
    timeout_s: float
    network: Network
    proxy: Path | None
    """Unix socket of the proxy for `RUN` lines, which reach it at PROXY_URL."""
    variables: Mapping[str, str]
    """Variables of the `RUN` lines. They are not in the image."""
    log: Path
    """File for its output."""
    lock: int
    """Descriptor of the image's lock file. A build that outlives this process keeps it."""


@dataclass(frozen=True)
class BuildOutput:
    """How a build ended. `code` is None if it exceeded its time limit."""

    code: int | None
    tail: str
    """Its last lines."""


class ImageBuilder(SandboxProvider):
    """A provider that builds Dockerfiles."""

    has_build_proxy = False
    """Its builds can use `ImageBuild.proxy`."""

    def sized_image(self, image: str, limits: Limits) -> str:
        """The name of the image for sandboxes with these limits. Another name if the image fixes them."""
        return image

    @abstractmethod
    async def image_size(self, name: str) -> int | None:
        """Bytes of the image, 0 if the builder does not tell; None if there is no such image."""

    @abstractmethod
    async def build_image(self, build: ImageBuild) -> BuildOutput:
        """Build under the name `draft_name_of(build.image)`. Raises: as `Pulls.present`, for the
        Dockerfile's own images; ConfigurationError for a network that it cannot give."""

    @abstractmethod
    async def rename_image(self, name: str, new: str) -> None: ...

    @abstractmethod
    async def remove_image(self, name: str) -> bool:
        """Remove this name of the image. False: it is in use. Succeeds if there is none."""


class LocalImageBuilder(ImageBuilder):
    """One whose images this host can pull, build and remove before a sandbox needs them."""

    downloads_to = "this host"
    settings: Settings

    @abstractmethod
    async def local_images(self) -> Mapping[str, int]:
        """The names of all images that are here, by tag and by digest, as `qualified_name` writes them,
        with their bytes."""

    @abstractmethod
    async def local_layers(self) -> Sequence[Sequence[str]]:
        """For each of at most MOST_COMPARED images that are here, the uncompressed digests of its layers, the
        lowest first."""

    async def images_here(self, names: Collection[str]) -> Mapping[str, int]:
        here = await self.local_images() if names else {}
        mirror = self.settings.sandbox.image_mirror
        found = {}
        for name in names:
            for one in (name, image_names.mirrored(name, mirror)):
                if (size := here.get(qualified_name(one))) is not None:
                    found[name] = size
        return found

    @abstractmethod
    async def pull_image(self, name: str) -> None:
        """Pull the image unless it is here. Raises: as `Pulls.present`."""


def image_name_of(digest: str) -> str:
    """The local name of the image that is built from this content."""
    return f"{REPOSITORY}:{digest[:40]}"


def draft_name_of(image: str) -> str:
    """The name of an image that was built and not checked yet."""
    return f"{image}-draft"


def limit_options(limits: Limits) -> list[str]:
    """Options of `build` in podman and docker."""
    size = limits.disk_mb << 20
    return [
        *("--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"),
        *("--cpu-period", "100000", "--cpu-quota", f"{int(limits.cpus * 100_000)}"),
        *("--ulimit", f"fsize={size}:{size}"),
    ]


def base_images(dockerfile: str) -> list[str]:
    """The images that the Dockerfile names, without its own stages, in order.

    A name with a variable that the Dockerfile gives no value is left out.

    Example: base_images("ARG V=1\\nFROM x:$V AS a\\nFROM a\\nCOPY --from=y / /") -> ["x:1", "y"]
    """
    values: dict[str, str] = {}
    stages: set[str] = {"scratch"}
    found: list[str] = []
    for line in instructions(dockerfile):
        if (given := _ARG.match(line)) and not found:
            pairs = (word.partition("=") for word in shlex.split(given[1]))
            values |= {name: value for name, _, value in pairs}
        elif stage := _FROM.match(line):
            found += _resolved_names(stage[1], values, stages)
            stages.add((stage[2] or "").lower())
        elif (other := _OTHER_IMAGE.match(line)) and not other[1].isdigit():
            found += _resolved_names(other[1], values, stages)
    return list(dict.fromkeys(found))


def qualified_name(name: str) -> str:
    """Example: qualified_name("ubuntu:24.04") -> "docker.io/library/ubuntu:24.04"."""
    registry = image_names.registry_of(name)
    if name.startswith(f"{registry}/"):
        return name
    return f"{registry}/{name}" if "/" in name else f"{registry}/library/{name}"


def _resolved_names(text: str, values: Mapping[str, str], stages: set[str]) -> list[str]:
    name = _VARIABLE.sub(lambda m: values.get(m[1] or m[2]) or m[3] or "$", text)
    return [] if "$" in name or name.lower() in stages else [name]


def instructions(dockerfile: str) -> list[str]:
    """The Dockerfile's lines without comments and here-documents, joined where they are continued."""
    text = re.sub(r"^\s*#.*\n?", "", dockerfile, flags=re.MULTILINE)
    lines = iter(re.sub(r"[\\`][ \t]*\n", " ", text).splitlines())
    found = []
    for line in lines:
        found.append(line.strip())
        if (document := _HEREDOC.match(line.strip())) is not None:
            for inside in lines:
                if inside.strip() == document[2]:
                    break
    return found


async def run_build(
    command: Sequence[str], build: ImageBuild, *, ends_on_signal: bool, given: bytes = b""
) -> BuildOutput:
    """Run the program with the input `given` to its end or its time limit. If the caller is
    cancelled, the program is stopped. If this process is killed, the program continues up to its
    time limit.

    `ends_on_signal`: SIGTERM lets it clean up. Otherwise it does so when its `RUN` line fails.
    """
    how = "signal" if ends_on_signal else "run"
    options = (str(build.timeout_s), str(build.limits.output_mb << 20), how)
    with tempfile.TemporaryFile() as stdin, build.log.open("wb") as log:
        stdin.write(given)
        stdin.seek(0)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", build_supervisor.__name__, *options, *command),
            stdin=stdin,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(build.lock,),
        )
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            process.terminate()
        await asyncio.shield(process.wait())
        raise
    return BuildOutput(None if code == -signal.SIGALRM else code, _tail(build.log))


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return last_lines(file.read().decode("utf-8", "replace"))


def last_lines(log: str) -> str:
    """The end of a build's log, for an error message."""
    return "\n".join(log[-TAIL_BYTES:].splitlines()[-TAIL_LINES:])
