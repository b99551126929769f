"""One build of a Dockerfile by E2B's builder, through the SDK.

The template's name is made from the image's, so all hosts of an account find the same template. A
newer build of a template ends the one in progress, so a build that exists is followed.
"""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.errors import ConfigurationError, ControlPlaneError
from perdure.sandboxes.guest.service_image_builds import ServiceBuild, failed
from perdure.sandboxes.guest.service_retries import cancellable
from perdure.sandboxes.image_builds import (
    DOCKERFILE,
    REPOSITORY,
    TAIL_LINES,
    BuildOutput,
    ImageBuild,
    base_images,
    last_lines,
)

if TYPE_CHECKING:
    from e2b import BuildInfo
    from e2b.api import ApiClient
    from e2b.template.main import TemplateBuilder
    from e2b_dockerfile_utils import DockerfileInstruction

Options = dict[str, Any]
"""Of every call of the SDK."""
Call = Callable[[str, Callable[[], Awaitable[Any]]], Awaitable[Any]]
"""Repeats a call that fails for a passing reason."""

POLL_S = 0.5
UNSTARTED_S = 60.0
"""Seconds after which a build that was requested but not started counts as abandoned."""
MOST_BUILDS = 5
"""Builds to follow if newer ones end each of them."""
PASSING = re.compile(r"(The )?build was cancell?ed|An internal error occurred", re.IGNORECASE)
"""Reasons that no Dockerfile causes."""
WITHOUT_EFFECT = {
    "CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "STOPSIGNAL", "VOLUME",
}  # fmt: skip
"""Instructions that change nothing in a sandbox, whose first process is ours."""
TRANSLATED = {"ADD", "ARG", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"}
FLAGS = {"chmod", "chown", "from", "link", "platform"}
"""Flags that the SDK translates, refuses itself, or may leave out."""
ARCHIVE = (".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst")


async def run_build(build: ImageBuild, call: Call, options: Options) -> ServiceBuild:
    """Follow the build of this image, or start one. Raises: the errors of `call`."""
    name = template_name(build.image)
    from e2b import SandboxException

    try:
        template = await asyncio.to_thread(_template, build.context)
    except (ValueError, OSError, SandboxException) as error:
        return failed(f"parse error for E2B's builder: {error}")
    said = ""
    for _ in range(MOST_BUILDS):
        info = await call("build", lambda: _found_or_started(template, name, build, options))
        status, log = await _followed(info, call, options)
        if status.status.value == "ready":
            return ServiceBuild(name, BuildOutput(0, last_lines(log)))
        said = status.reason.message if status.reason is not None else "no reason given"
        if not PASSING.match(said):
            return failed(f"Image build for {name} failed: {said}\n{last_lines(log)}")
    raise ControlPlaneError(f"E2B: build of {name}: {said}")


def template_name(image: str) -> str:
    return f"perdure-build-{image.removeprefix(f'{REPOSITORY}:')}"


async def remove_template(name: str, options: Options) -> bool:
    """Delete the template and end its build. False: a sandbox uses it. Raises: the SDK's errors."""
    from e2b.api import handle_api_exception
    from e2b.api.client.api.templates import delete_templates_template_id

    response = await delete_templates_template_id.asyncio_detailed(name, client=_client(options))
    if response.status_code == 400 and b"sandboxes using it" in response.content:
        return False
    if response.status_code not in (204, 404):
        raise handle_api_exception(response)
    return True


async def newest_build(name: str, options: Options) -> "BuildInfo | None":
    """None if the account has no such template. Raises: the SDK's errors."""
    from e2b import AsyncTemplate, BuildInfo, SandboxException
    from e2b.api import handle_api_exception
    from e2b.api.client.api.templates import get_templates_aliases_alias

    response = await get_templates_aliases_alias.asyncio_detailed(name, client=_client(options))
    if response.status_code == 404:
        return None
    if response.status_code != 200:
        raise handle_api_exception(response)
    template: Any = response.parsed
    try:
        tags = await AsyncTemplate.get_tags(template.template_id, **options)
    except SandboxException as error:
        if getattr(error, "status_code", None) == 404:  # deleted by now
            return None
        raise
    if not tags:
        return None
    newest = max(tags, key=lambda tag: tag.created_at)
    return BuildInfo(template.template_id, newest.build_id, name=name, alias=name)


def _client(options: Options) -> "ApiClient":
    from e2b.api.client_async import get_api_client
    from e2b.connection_config import ConnectionConfig

    return get_api_client(ConnectionConfig(**options))


async def _found_or_started(
    template: "TemplateBuilder", name: str, build: ImageBuild, options: Options
) -> "BuildInfo":
    from e2b import AsyncTemplate
    from e2b.exceptions import BuildException

    if (found := await _build_to_follow(name, options)) is not None:
        return found
    limits = build.sandbox_limits
    try:
        return await AsyncTemplate.build_in_background(
            template,
            name,
            cpu_count=_cpus(limits.cpus),
            memory_mb=limits.memory_mb + limits.memory_mb % 2,
            min_free_disk_mb=limits.disk_mb,
            **options,
        )
    except BuildException as error:
        if "waiting state" in str(error):  # another host requested a newer build
            raise ControlPlaneError(f"E2B: build: {error}") from error
        if str(error).startswith(("400:", "409:")):
            raise ConfigurationError(f"E2B refuses to build {name}: {error}") from error
        raise


async def _build_to_follow(name: str, options: Options) -> "BuildInfo | None":
    """The newest build unless it failed. One that a host has requested is given time to start."""
    from e2b import AsyncTemplate

    waiting = None
    until = time.monotonic() + UNSTARTED_S
    while (info := await cancellable(lambda: newest_build(name, options))) is not None:
        status = (await AsyncTemplate.get_build_status(info, **options)).status.value
        if status in ("ready", "building"):
            return info
        if waiting is None or waiting.build_id != info.build_id:
            waiting, until = info, time.monotonic() + UNSTARTED_S
        if status == "error" or time.monotonic() > until:
            return None
        await asyncio.sleep(POLL_S)
    return None


async def _followed(info: "BuildInfo", call: Call, options: Options) -> "tuple[Any, str]":
    """The final status, and the end of the log."""
    from e2b import AsyncTemplate

    seen, lines = 0, list[str]()
    while True:

        async def ask(seen: int = seen) -> Any:
            return await AsyncTemplate.get_build_status(info, seen, **options)

        status = await call("build status", ask)
        new = status.log_entries
        seen += len(new)
        lines = [*lines, *(entry.message.rstrip() for entry in new)][-2 * TAIL_LINES :]
        if status.status.value in ("ready", "error") and not new:  # the log comes in pieces
            return status, "\n".join(lines)
        if not new:
            await asyncio.sleep(POLL_S)


def _cpus(wanted: float) -> int:
    """E2B gives one CPU or an even number."""
    count = math.ceil(wanted)
    return count if count == 1 else count + count % 2


def _template(context: Path) -> "TemplateBuilder":
    """The Dockerfile in the SDK's form. Raises: ValueError, for example for what E2B would build
    differently from Docker; SandboxException; OSError."""
    from e2b import AsyncTemplate
    from e2b_dockerfile_utils import parse_dockerfile_ast

    text = (context / DOCKERFILE).read_text()
    lines = text.splitlines()
    found = parse_dockerfile_ast(text).instructions
    for one in found:
        if one.name in WITHOUT_EFFECT:
            lines[one.start_line - 1 : one.end_line] = [""] * (one.end_line - one.start_line + 1)
        elif problem := _problem(one):
            raise ValueError(
                f"line {one.start_line}: {problem}; use --sandbox podman, or change the Dockerfile"
            )
        elif one.name == "FROM" and (images := base_images(text)):
            lines[one.start_line - 1] = f"FROM {images[0]}"  # the SDK gives ARGs no value here
    builder = AsyncTemplate(file_context_path=context).from_dockerfile("\n".join(lines))
    names = {one.name for one in found}
    if "USER" not in names:
        builder.set_user("root")
    if "WORKDIR" not in names:
        builder.set_workdir("/")
    AsyncTemplate.to_json(builder)  # it reads the files that `COPY` names
    return builder


def _problem(one: "DockerfileInstruction") -> str:
    """Why E2B cannot build the instruction. The SDK leaves out what it does not know."""
    if one.name not in TRANSLATED:
        return f"{one.name} is not supported"
    for flag in one.flags:
        name = flag.removeprefix("--").partition("=")[0]
        if name not in FLAGS and not (name == "mount" and "type=cache" in flag):
            return f"{one.name} --{name} is not supported"
    if one.name == "ADD" and any(word.endswith(ARCHIVE) for word in one.args[:-1]):
        return "ADD of an archive, which Docker unpacks, is not supported"
    return ""
