"""The table of docs/agents.md is what `perdure agents check` prints."""

from collections.abc import Mapping

import pytest

from perdure import variant_registry
from perdure.agents.base import ChecksHost
from perdure.errors import MissingDependency
from perdure.testing import agent_check
from perdure.testing.agent_stand import Stand
from tests.docs_pages import agent_rows

ROWS: Mapping[str, str] = agent_rows()


@pytest.mark.registry
@pytest.mark.parametrize("name", ROWS)
async def test_an_agent_does_what_the_docs_say(stand: Stand, name: str) -> None:
    """It solves the task in each run, and its row is the printed one."""
    agent = variant_registry.load("agent", variant_registry.AGENTS, name)()
    if isinstance(agent, ChecksHost):
        try:
            agent.check_host(stand.agents)
        except MissingDependency as missing:
            pytest.skip(str(missing))
    found = await agent_check.check(stand, agent)

    assert found.problem == ""
    assert agent_check.table([found]).splitlines()[-1] == ROWS[name]
