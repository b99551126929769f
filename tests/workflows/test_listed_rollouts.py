"""Which rollouts of a run Temporal lists, on a real server."""

import pytest
from temporalio.client import Client

from perdure.client import rollout_listing, search_attribute_keys, temporal_names
from perdure.client.sdk import Perdure
from perdure.types import RolloutRequest
from tests.stack.wait_until import until

STARTED = 24


def _request(number: int) -> RolloutRequest:
    return RolloutRequest(run_id="r1", instance=f"toy/i-{number:02}", agent="nop")


async def _start(client: Client, number: int) -> None:
    request = _request(number)
    await client.start_workflow(
        temporal_names.ROLLOUT,
        request.model_dump(mode="json"),
        id=request.workflow_id,
        task_queue="nothing-polls-this",
        search_attributes=search_attribute_keys.of_rollout(request),
    )


async def test_the_oldest_and_the_newest_rollouts_are_found_without_a_whole_list(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest open rollouts come in start order, without closed ones."""
    monkeypatch.setattr(rollout_listing, "FEW", 6)
    for number in range(STARTED):
        await _start(client, number)
    for number in (0, 2):
        await client.get_workflow_handle(_request(number).workflow_id).terminate()

    async def listed() -> bool:
        return await rollout_listing.count(client, "r1") == {
            "Running": STARTED - 2,
            "Terminated": 2,
        }

    await until(listed, "the server lists all of them")
    oldest = await rollout_listing.oldest_open(client, "r1", 4)
    newest = await rollout_listing.newest(client, "r1", STARTED - 1)

    assert [one.instance for one in oldest] == [f"toy/i-{n:02}" for n in (1, 3, 4, 5)]
    open_ones = [f"toy/i-{n:02}" for n in reversed(range(STARTED)) if n not in (0, 2)]
    assert [one.instance for one in newest] == [*open_ones, "toy/i-02"]


async def test_rollouts_without_a_run_are_counted_under_their_run_id(client: Client) -> None:
    """Rollouts that were started one by one have no run, but still have a progress."""
    perdure = Perdure(client)
    for number in range(2):
        await _start(client, number)
    await client.get_workflow_handle(_request(0).workflow_id).terminate()

    async def listed() -> bool:
        return await rollout_listing.count(client, "r1") == {"Running": 1, "Terminated": 1}

    await until(listed, "the server lists both")
    found = await perdure.standalone_rollouts_status("r1")

    assert found is not None
    assert (found.state, found.total, found.done, found.running) == ("started by hand", 2, 1, 1)
    assert await perdure.standalone_rollouts_status("nobody's") is None


async def test_a_rollout_that_ran_again_is_listed_once(client: Client) -> None:
    """Of two executions of one rollout or run, the last one is shown."""
    perdure = Perdure(client)
    for _ in range(2):
        await _start(client, 0)
        await client.get_workflow_handle(_request(0).workflow_id).terminate()
        await client.start_workflow(
            temporal_names.RUN, id="run/r1", task_queue="nothing-polls-this"
        )
        await client.get_workflow_handle("run/r1").terminate()
    await _start(client, 0)

    async def listed() -> bool:
        counted = await client.count_workflows("WorkflowId = 'run/r1'")
        return counted.count == 2 and await rollout_listing.count(client, "r1") == {
            "Running": 1,
            "Terminated": 2,
        }

    await until(listed, "the server lists all executions")

    assert [one.execution for one in await rollout_listing.newest(client, "r1", 9)] == ["Running"]
    assert [one.id for one in await perdure.runs()] == ["run/r1"]


async def test_rollouts_without_a_seat_are_counted_as_waiting(client: Client) -> None:
    """Rollouts whose boot has not begun count as waiting."""
    for number in range(2):
        await _start(client, number)

    async def listed() -> bool:
        return await rollout_listing.count(client, "r1") == {"Running": 2}

    await until(listed, "the server lists both")

    assert await rollout_listing.waiting(client, "r1") == 2
