"""A whole rollout of `acp`: what its options name is installed, its turns are recorded and graded."""

from pathlib import Path

import pytest

from perdure.types import Outcome, RolloutStatus
from tests.agents import tiny_acp_server
from tests.stack.gated_engine import TURNS, commands
from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import running
from tests.stack.wait_until import until

pytestmark = [pytest.mark.temporal, pytest.mark.registry]

PACKAGE = "is-odd@3.0.1"
"""A small npm package. The command refuses to start without its dependency."""
COMMAND = [
    "sh",
    "-c",
    'test -d /opt/acp-server/node_modules/is-number && exec python3 -c "$0"',
    Path(tiny_acp_server.__file__).read_text(),
]


async def test_a_server_of_the_options_solves_an_instance(tmp_path: Path) -> None:
    """Each of the user's turns makes the server run one command; the episode is resolved."""
    if missing := why_not_here():
        pytest.skip(missing)
    runs = [{"content": f"RUN {command}"} for command in (*commands(), "true")]
    options = {"command": COMMAND, "package": PACKAGE}
    user = {"messages": ["Go on."] * (len(runs) - 1)}
    async with running(tmp_path / "stack") as stack:
        stack.engine.control(scripts={"default": {"turns": runs}})
        request = await stack.start("acp", agent="acp", agent_options=options, user=user)
        await until(lambda: stack.is_over(request), "the rollout is over")
        episode = await stack.episode(request)

    assert episode.status is RolloutStatus.GRADED, (episode, stack.last_words())
    assert (episode.outcome, episode.turns) == (Outcome.RESOLVED, TURNS)
