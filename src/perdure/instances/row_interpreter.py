"""Finds the interpreter of a row: one that starts on this host, otherwise one that uv installs."""

import asyncio
import functools
import sys
from collections.abc import Iterable
from pathlib import Path

from perdure import python_interpreters
from perdure.errors import InstanceError
from perdure.instances import uv_program
from perdure.types import Instance, SourceKind


@functools.lru_cache
def find_python(version: str) -> Path:
    """The prefix of an interpreter of this version, such as `3.10` or `3.10.13`.

    It is Perdure's own, another one on this host, or one that uv installs. Raises: InstanceError
    with uv's message.
    """
    if version.split(".")[:2] == [str(part) for part in sys.version_info[:2]]:
        return Path(sys.base_prefix)
    if (found := python_interpreters.find_interpreter(version)) is not None:
        return found.prefix
    installed = uv_program.run(["python", "install", "-q", "--no-progress", version])
    if (
        installed.returncode == 0
        and (found := python_interpreters.find_interpreter(version)) is not None
    ):
        return found.prefix
    raise InstanceError(
        f"`environment.python`: no Python {version} starts on this host. Install Python {version}, "
        f"or exclude the instance. Searched: {python_interpreters.places_searched()}. "
        f"uv cannot install it: {_told(installed.stderr)}"
    )


async def check(instances: Iterable[Instance]) -> None:
    """Check that this host has the interpreters of these instances. Raises: InstanceError naming
    the first instance without one."""
    versions: dict[str, str] = {}
    for instance in instances:
        if instance.source.kind is not SourceKind.IMAGE:
            versions.setdefault(instance.environment.python, instance.ref)
    for version, ref in versions.items():
        try:
            await asyncio.to_thread(find_python, version)
        except InstanceError as error:
            raise InstanceError(f"{ref}: {error}") from error


def _told(stderr: bytes) -> str:
    """uv's message in one line, without its `error:`."""
    words = " ".join(stderr.decode("utf-8", "replace").split())
    return words.removeprefix("error: ")[:600] or "uv gave no message"
