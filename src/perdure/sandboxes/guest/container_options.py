"""What the containers of `docker` and `kubernetes` share: first process, capabilities, system-call
filter, uploads, and how to recognize an image without python3. `modal` uses the first process.
"""

import base64
import inspect
from abc import abstractmethod
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from perdure.errors import InstanceError
from perdure.sandboxes.guest.guest_sandbox import FOLDER, GuestSandbox
from perdure.sandboxes.host.forward_proxy import PROXY_PORT
from perdure.sandboxes.host.keeper import gateway_forwarder, seccomp_filter
from perdure.sandboxes.image_architecture import RUN_ELSEWHERE

DEADLINE = f"{FOLDER}/deadline"
"""File inside that holds the time at which the first process ends the sandbox, on two clocks: unix
time and the container's monotonic time."""
ROOT = "0:0"
"""User and group id."""
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID")
"""Capabilities of the guest program. Commands have none."""
MACHINES = ("x86_64", "aarch64")
NO_PROGRAM = (
    "executable file not found",
    "no such file or directory: unknown",
    ": not found",
    ": command not found",
)
"""How container runtimes and shells report a missing program."""
FOREIGN_PROGRAM = "exec format error"
"""How a kernel reports a program of another architecture."""


class ContainerSandbox(GuestSandbox):
    """Commands run without capabilities, as `agent` or as root of the instance's own image."""

    _variables: Mapping[str, str]
    """The image's environment variables."""

    def _environment(self) -> Mapping[str, str]:
        return self._variables

    def _seal(self) -> Mapping[str, str]:
        return {name: base64.b64encode(seccomp_filter.program(name)).decode() for name in MACHINES}

    async def _write(self, path: str, data: bytes | Path) -> None:
        await self._write_and_print("upload", path, data, "true")

    @abstractmethod
    async def _write_and_print(self, what: str, path: str, data: bytes | Path, command: str) -> str:
        """Upload `data` and run a shell line that uses it, in one call."""


def init_command(ttl_s: float, *, proxy: str = "") -> tuple[str, ...]:
    """Arguments of `python3` for the first process, which ends its container at the deadline.
    `proxy`: a unix socket inside, to which it forwards PROXY_PORT."""
    program = ("-I", "-c", source_of("container_init.py"), str(ttl_s), DEADLINE)
    if not proxy:
        return program
    return *program, inspect.getsource(gateway_forwarder), str(PROXY_PORT), proxy


def source_of(name: str) -> str:
    """The source of a program that runs inside the sandbox."""
    return resources.files("perdure.sandboxes.guest.in_sandbox").joinpath(name).read_text()


def names_missing_program(said: str) -> bool:
    """Whether the output reports a program that is missing, or built for another architecture."""
    return any(words in said.lower() for words in (*NO_PROGRAM, FOREIGN_PROGRAM))


def missing_programs_error(identity: str, said: str) -> InstanceError:
    problem = "lacks python3 or a shell tool"
    if FOREIGN_PROGRAM in said.lower():
        problem = f"is for an architecture that its host cannot run ({RUN_ELSEWHERE})"
    return InstanceError(f"the image of sandbox {identity!r} {problem}: {said[-300:]}")
