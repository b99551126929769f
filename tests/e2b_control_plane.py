"""E2B's control plane alone: it really makes, finds and kills sandboxes, but runs no command in
them.

For bursts of rollouts, whose tests need no commands and no CPU for them.
"""

from collections.abc import Mapping
from typing import Literal

from perdure.agents.base import EXEC_ID
from perdure.sandboxes.base import Exec, ExecState, ExecStatus, SandboxSpec
from perdure.sandboxes.providers.e2b.provider import E2BProvider, E2BSandbox

NAME = "tests.e2b_control_plane:HollowE2B"


class HollowSandbox(E2BSandbox):
    async def start(self, exec_id: str, command: Exec) -> None:
        return None

    async def poll(self, exec_id: str) -> ExecStatus:
        if exec_id == EXEC_ID:
            return ExecStatus(ExecState.EXITED, code=0)
        return ExecStatus(ExecState.KILLED, cause="output")  # the capture: too large, so no tests

    async def wait(self, exec_id: str, timeout_s: float | None = None) -> ExecStatus:
        return await self.poll(exec_id)

    async def output(
        self,
        exec_id: str,
        stream: Literal["stdout", "stderr"] = "stdout",
        offset: int = 0,
        limit: int = 1 << 24,
    ) -> bytes:
        return b""

    async def signal(self, exec_id: str, signum: int) -> None:
        return None

    async def end_all(self) -> None:
        return None

    async def set_up(self, spec: SandboxSpec) -> None:
        return None


class HollowE2B(E2BProvider):
    """Its boxes are made bare: what is uploaded into one is not there."""

    async def _make(self, spec: SandboxSpec, identity: str) -> E2BSandbox:
        return _hollow(await super()._make(spec, identity))

    async def _connect(self, sandbox_id: str, identity: str, own: Mapping[str, str]) -> E2BSandbox:
        return _hollow(await super()._connect(sandbox_id, identity, own))


def _hollow(box: E2BSandbox) -> HollowSandbox:
    own: Mapping[str, str] = {"perdure_workdir": box.workdir}
    return HollowSandbox(box.provider, box.sdk, box.identity, own)
