"""Two builds of a worker, and what an operator does at a deploy."""

from typing import TYPE_CHECKING

from tests.stack.stack_process import Process
from tests.stack.wait_until import until

if TYPE_CHECKING:
    from tests.stack.running_stack import Stack

VARIABLE = "PERDURE_DEPLOYMENT__BUILD_ID"
BUILDS = {"v1": "workers", "v2": "tests.next_build"}
"""Build id -> the program of its workers."""


async def start_worker(stack: "Stack", build: str) -> Process:
    """`build`: empty for a worker without a build id."""
    if not build:
        return await stack.start_worker()
    return await stack.start_worker(BUILDS[build], **{VARIABLE: build})


async def make_current(stack: "Stack", build: str) -> None:
    """Asks again while the server does not know all queues of a worker that has just started."""
    command = ("set-current-version", "--deployment-name", "perdure", "--build-id", build, "--yes")

    async def made() -> bool:
        try:
            await stack.temporal_cli("worker", "deployment", *command)
        except AssertionError:
            return False
        return True

    await until(made, f"{build} is current")
