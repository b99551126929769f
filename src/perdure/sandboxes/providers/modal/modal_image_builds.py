"""One build of a Dockerfile by Modal's builder, through the SDK.

Modal keeps images by their content: a repeated build joins the one in progress, or gets the image
that it made. Nothing can stop a build there.
"""

import re
from typing import TYPE_CHECKING

from perdure.errors import ControlPlaneError
from perdure.sandboxes.guest.service_image_builds import ServiceBuild, failed
from perdure.sandboxes.image_builds import (
    DOCKERFILE,
    TAIL_LINES,
    BuildOutput,
    ImageBuild,
    last_lines,
)
from perdure.sandboxes.providers.modal.modal_client import Connection

if TYPE_CHECKING:
    import modal

DOCKERFILE_FAILED = re.compile(r"Image build for \S+ (failed|timed out)")
OUT_OF_MEMORY = ("Unknown status 9!", "Unknown status 10!")
"""What the SDK says of a build that Modal ended because of its memory."""


async def run_build(build: ImageBuild, it: Connection) -> ServiceBuild:
    """Wait for the build's end. Raises: ControlPlaneError if Modal gave it up; the SDK's errors."""
    import modal

    image = modal.Image.from_dockerfile(build.context / DOCKERFILE, context_dir=build.context)
    try:
        await image.build.aio(it.app)
    except modal.exception.ImageBuildError as error:
        said = str(error)
        if said in OUT_OF_MEMORY:
            said = f"Image build for {error.image_id} failed: out of memory"
        if not DOCKERFILE_FAILED.match(said):
            raise ControlPlaneError(f"Modal: {said}") from error
        return failed(f"{said}\n{await _log_of(image)}")
    except (modal.exception.InvalidError, ValueError) as error:
        return failed(f"parse error of the SDK: {error}")  # it reads the Dockerfile's COPY lines
    return ServiceBuild(image.object_id, BuildOutput(0, ""))


async def _log_of(image: "modal.Image") -> str:
    """The last lines that the failed build printed."""
    from modal.exception import Error

    try:
        entries = [entry.message async for entry in image.logs.tail.aio(TAIL_LINES)]
    except (Error, OSError) as error:
        return f"(its log cannot be read: {error})"  # the build's failure is known without it
    return last_lines("".join(entries))
