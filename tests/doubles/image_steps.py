"""Runs the steps of a Dockerfile in a box of a double: at its build, and again in each sandbox of the
image, so that a sandbox has what the lines made. The base image is not there: a box has this host's
programs.
"""

import posixpath
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perdure.sandboxes.base import Sandbox

COPY = """set -e
rm -rf /tmp/.copied && mkdir -p /tmp/.copied && tar -xf /tmp/.copied.tar -C /tmp/.copied
for one in /tmp/.copied/{source}; do
  case {target} in */) mkdir -p {target} ;; *) mkdir -p "$(dirname {target})" ;; esac
  if [ -d "$one" ]; then mkdir -p {target} && cp -a "$one/." {target}; else cp -a "$one" {target}; fi
done
rm -rf /tmp/.copied /tmp/.copied.tar
"""


@dataclass(frozen=True)
class ImageStep:
    """`kind`: RUN, COPY, ENV or WORKDIR. Example: ImageStep("COPY", ["app", "/app"], Path("app.tar"))"""

    kind: str
    args: list[str]
    archive: Path | None = None
    """The tar archive of what a COPY names, with its names in the build context."""


@dataclass
class StepContext:
    """What earlier steps set for later ones."""

    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"


async def run_step(
    box: Sandbox, step: ImageStep, context: StepContext, said: Callable[[str], None]
) -> int | None:
    """The exit code; None if a signal ended it. `said` gets each line of output."""
    match step.kind:
        case "ENV":
            context.env |= dict(zip(step.args[::2], step.args[1::2], strict=True))
            return 0
        case "WORKDIR":
            context.workdir = posixpath.join(context.workdir, step.args[0])
            return (await box.exec(["mkdir", "-p", context.workdir])).status.code
        case "COPY":
            assert step.archive is not None
            await box.put("/tmp/.copied.tar", step.archive)
            target = shlex.quote(posixpath.join(context.workdir, step.args[1]))
            script = COPY.format(source=step.args[0].removeprefix("./"), target=target)
        case _:
            script = step.args[0]
    done = await box.exec(
        ["sh", "-c", f"exec 2>&1\n{script}"], env=context.env, cwd=context.workdir
    )
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        said(line)
    return done.status.code


async def replay(box: Sandbox, steps: list[ImageStep], env: Mapping[str, str] = {}) -> None:
    """Make the image's files in a new sandbox."""
    context = StepContext(dict(env))
    for step in steps:
        code = await run_step(box, step, context, lambda _: None)
        assert code == 0, f"{step} worked in the build"
