"""A run that has ended starts again for some of its rollouts, on a real server."""

from typing import Any

import pytest
from temporalio.client import Client

from perdure.client.sdk import Perdure
from perdure.errors import ConfigurationError
from perdure.rollouts.activity_messages import (
    Attempt,
    Booted,
    Page,
    PageRequest,
    PreparedRun,
    RolloutAgain,
)
from perdure.types import PlayAgain, RunRequest
from tests.workflows.activity_gate import Gate
from tests.workflows.scripted_stages import Stages

RUN = RunRequest(
    run_id="again", instances=("toy/a", "toy/b"), n_samples=2, rollout={"agent": "nop"}
)
AGAIN = RUN.model_copy(update={"again": PlayAgain(round=1, start_at="grade")})
LISTED = RolloutAgain(instance="toy/b", sample_index=1, round=1)


def listing(stages: Stages) -> None:
    """The first start has two instances. The next one lists a single rollout."""

    async def prepare(run: RunRequest) -> PreparedRun:
        return PreparedRun(total=1 if run.again else len(run.instances))

    async def page(request: PageRequest) -> Page:
        if request.round:
            return Page(instances=(), again=(LISTED,))
        return Page(instances=RUN.instances[request.start : request.stop])

    stages.override |= {"prepare_run": prepare, "load_page": page}


async def test_only_the_listed_rollouts_are_played_again(client: Client, stages: Stages) -> None:
    """One of four rollouts runs again, under its own workflow id, with the round and the start
    stage."""
    booted: list[Attempt] = []

    async def boot(attempt: Attempt) -> Booted:
        booted.append(attempt)
        return Booted(uri="file:///x")

    listing(stages)
    stages.override["boot_sandbox"] = boot
    perdure = Perdure(client)
    await (await perdure.start_run(RUN)).result()
    first = len(booted)
    handle = await perdure.play_again(AGAIN)
    await handle.result()

    (played,) = [attempt.request for attempt in booted[first:]]
    told: tuple[Any, ...] = (played.instance, played.sample_index, played.round, played.start_at)
    assert (first, told) == (4, ("toy/b", 1, 1, "grade"))
    assert len(await handle.rollouts()) == 4  # each rollout is listed once: its last play


async def test_a_listed_run_plays_its_list(client: Client, stages: Stages) -> None:
    """Instances with different numbers of samples: nothing is planned or played beyond the list."""
    booted: list[Attempt] = []
    named = [("toy/a", 0), ("toy/a", 1), ("toy/b", 0)]

    async def boot(attempt: Attempt) -> Booted:
        booted.append(attempt)
        return Booted(uri="file:///x")

    async def prepare(run: RunRequest) -> PreparedRun:
        return PreparedRun(total=len(named))

    async def page(request: PageRequest) -> Page:
        assert request.listed
        again = [RolloutAgain(instance=one, sample_index=number, round=0) for one, number in named]
        return Page(instances=(), again=tuple(again[request.start : request.stop]))

    stages.override |= {"prepare_run": prepare, "load_page": page, "boot_sandbox": boot}
    run = RUN.model_copy(update={"run_id": "uneven", "listed": True})
    handle = await Perdure(client).start_run(run)
    summary = await handle.result()

    asked = [attempt.request for attempt in booted]
    assert sorted((one.instance, one.sample_index) for one in asked) == named
    assert {(one.round, one.start_at) for one in asked} == {(0, "boot")}
    assert (summary.rollouts, (await handle.progress()).total) == (3, 3)


async def test_an_open_run_is_not_started_again(client: Client, stages: Stages) -> None:
    """The retry is refused, and the open run continues."""
    gate = Gate()
    listing(stages)
    stages.override["run_agent"] = gate.agent
    run = RUN.model_copy(update={"run_id": "open"})
    handle = await Perdure(client).start_run(run)
    await gate.until_running(1)

    with pytest.raises(ConfigurationError, match="run 'open' is open: `perdure watch open`"):
        await Perdure(client).play_again(run.model_copy(update={"again": AGAIN.again}))

    gate.open.set()
    summary = await handle.result()
    assert summary.rollouts == 4
