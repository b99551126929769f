"""A handler with document 003's hooks, whose own agent runs in the worker."""

import hashlib
from pathlib import Path

import pytest

from perdure.instances import instance_catalog
from perdure.rollouts.activity_messages import AgentRun
from perdure.storage import store_keys
from tests import calling_handler
from tests.stack.host_requirements import why_not_here
from tests.stack.made_instances import INSTANCE
from tests.stack.running_stack import running
from tests.stack.wait_until import until

pytestmark = pytest.mark.temporal


@pytest.mark.longer
async def test_a_handlers_own_agent_calls_the_model_and_works_in_the_sandbox(
    tmp_path: Path,
) -> None:
    """Its call is a recorded turn, what changed in the sandbox is the patch, and `eval` sees the
    metadata and the results of the other hooks."""
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path / "stack") as stack:
        found = await instance_catalog.load(stack.store, INSTANCE)
        own = found.model_copy(update={"instance_id": "own", "data_source": calling_handler.NAME})
        await instance_catalog.save(stack.store, own)
        options = {"agent": "mini_swe_agent", "agent_options": {"step_limit": 7}}
        request = await stack.start("own", instance=own.ref, **options)
        await until(lambda: stack.is_over(request), "the rollout is over")
        episode = await stack.episode(request)
        stored = await stack.store.get(f"{store_keys.attempt(request, 1)}/agent.json")
        turns = await stack.store.get(f"{store_keys.attempt(request, 1)}/turns.parquet")

        run = AgentRun.model_validate_json(stored.data)
        assert run.turns_sha256 == hashlib.sha256(turns.data).hexdigest()
        assert (episode.reward, episode.turns, len(episode.attempts)) == (1.0, 1, 1)
