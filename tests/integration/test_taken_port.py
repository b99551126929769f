"""If a port is taken between the check and the start, the stack uses another one."""

import socket
from pathlib import Path
from typing import Any

import pytest

from perdure.gateway.http import listening_sockets
from perdure.settings.settings_tree import Settings
from perdure.stack import part_readiness, stack_ports
from perdure.stack.stack_plan import Addresses, Plan
from perdure.stack.stack_supervisor import Supervisor

pytestmark = pytest.mark.temporal

ROOT = Path(__file__).parents[2]


async def test_temporal_moves_and_the_gateway_stays(tmp_path: Path) -> None:
    """A client finds the gateway at the address it was given, even if the port was set by hand."""
    told: list[dict[str, Any]] = []
    with socket.create_server((stack_ports.LOOPBACK, 0)) as quicker:
        taken = quicker.getsockname()[1]
        settings = Settings(home=tmp_path, gateway={"port": stack_ports.free_port()})
        chosen = Addresses.choose(settings, own_temporal=True)
        raced = Addresses(
            **{**vars(chosen), "temporal_address": f"127.0.0.1:{taken}", "temporal_port": taken}
        )
        with listening_sockets.bound(settings):
            supervisor = Supervisor(Plan(settings, ROOT, raced), told.append, [])
            try:
                await supervisor._start_own_temporal()
                answers = await part_readiness.answers(supervisor.plan.temporal_health)
            finally:
                await supervisor._stop()

    moved = supervisor.plan.addresses
    assert (answers, moved.temporal_port != taken) == (True, True)
    assert moved.gateway_port == settings.gateway.port
