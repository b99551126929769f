"""`perdure sweep` on a real stack: one run for each combination of values, and one table."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from perdure.cli.main import invoke
from perdure.rollouts import run_label
from tests.stack.host_requirements import why_not_here
from tests.stack.made_instances import INSTANCE
from tests.stack.running_stack import Stack, running

pytestmark = [pytest.mark.temporal, pytest.mark.asyncio(loop_scope="module")]

SWEEP = ("sweep", INSTANCE, "--vary", "agent=oracle,nop", "--vary", "agent_budget_s=100,200")
VALUES = [
    {"agent": agent, "agent_budget_s": budget}
    for agent in ("oracle", "nop")
    for budget in ("100", "200")
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture(autouse=True)
def commands_use_this_stack(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_HOME", str(stack.home))
    monkeypatch.setenv("PERDURE_STORE", stack.store.url)
    monkeypatch.setenv("TEMPORAL_ADDRESS", stack.client.service_client.config.target_host)
    monkeypatch.setenv("TEMPORAL_NAMESPACE", stack.client.namespace)


async def test_each_combination_is_a_run_and_the_same_command_joins_them(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await _swept(capsys)
    again = await _swept(capsys)

    assert [one["values"] for one in first["runs"]] == VALUES
    assert [one["resolved"] for one in first["report"]["runs"]] == [1, 1, 0, 0]
    assert again == first, "with the same times, so nothing ran twice"
    labels = [await run_label.read(stack.store, one["run_id"]) for one in first["runs"]]
    assert labels[1].name == "agent=oracle, agent_budget_s=200"

    await asyncio.to_thread(invoke, SWEEP)
    table = capsys.readouterr().out
    rows = [
        line.split() for line in table.splitlines() if line.split()[:1] in (["oracle"], ["nop"])
    ]
    assert [row[:2] for row in rows] == [list(one.values()) for one in VALUES]
    assert ["100.0" in row for row in rows] == [True, True, False, False]


async def _swept(capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    code = await asyncio.to_thread(invoke, [*SWEEP, "--json"])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)


async def test_one_bad_combination_starts_no_run(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    before = await _runs(stack)
    command = ("sweep", INSTANCE, "-a", "oracle", "--vary", "agent_budget_s=100,soon")
    code = await asyncio.to_thread(invoke, command)

    assert code == 2
    assert "agent_budget_s" in capsys.readouterr().err
    assert await _runs(stack) == before


async def _runs(stack: Stack) -> list[str]:
    return [key async for key in stack.store.list("runs/")]
