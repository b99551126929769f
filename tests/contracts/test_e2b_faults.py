"""Failures that only E2B has. `test_service_faults` tests the others."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.errors import SandboxLost
from perdure.sandboxes.providers.e2b import provider as e2b
from tests.doubles.e2b_server import serving
from tests.service_harness import E2B, ID, SPEC, Bench, Service, impatient

CREATE, EXEC = E2B.create, E2B.execute


@pytest.fixture
def service() -> Service:
    return E2B


@pytest.mark.parametrize("how", ["cut", "no_end", "empty_end", "unavailable"])
async def test_a_stream_that_lies_changes_no_result(bench: Bench, how: str) -> None:
    """A stream that is cut, or has no or an empty end, never turns a failure into a success."""
    async with bench.box() as box:
        bench.inject(EXEC, stream=how, times=2)
        result = await box.exec("echo ran >>count; echo out; exit 7")

        assert (result.status.code, result.stdout, await bench.count(box)) == (
            7,
            b"out\n",
            b"ran\n",
        )


@pytest.mark.parametrize(
    ("route", "sent", "said"),
    [
        ("rules", [{"mtch": "x"}], "unexpected keyword argument 'mtch'"),
        ("settings", {"max_lives": 0}, "no setting max_lives: there are max_live, others_live"),
    ],
)
async def test_misspelt_control_is_refused_by_name(
    tmp_path: Path, route: str, sent: Any, said: str
) -> None:
    """A misspelled rule or setting is an error, because its fault would never happen."""
    async with serving(tmp_path) as (_, url), httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/__control/{route}", json=sent)

    assert (answer.status_code, said in answer.text) == (400, True)


@pytest.mark.parametrize("word", ["idempotency_in_progress", "idempotency_outcome_unknown"])
async def test_conflict_about_the_key_ends_with_one_sandbox(bench: Bench, word: str) -> None:
    """If the service is unsure of the key's first request, the sandbox that it made is adopted."""
    body = {"code": 409, "message": word, "error_code": word}
    bench.inject(CREATE, when="after", status=409, body=body)
    async with bench.box():
        live = len(bench.live)

    assert (live, bench.live) == (1, [])


async def test_sandbox_that_dies_in_its_set_up_is_not_made_again(
    bench: Bench, tmp_path: Path
) -> None:
    """After a sandbox has answered, its end is reported, and no second one is created silently."""
    (tmp_path / "tree").mkdir()
    bench.inject(E2B.upload, kill=True)
    with pytest.raises(SandboxLost):
        await bench.provider.create(replace(SPEC, tree=tmp_path / "tree"), ID)

    assert (len(bench.asked("POST /v2/sandboxes")), bench.live) == (1, [])


async def test_command_that_breaks_the_sandbox_costs_it_alone(bench: Bench) -> None:
    """A sandbox in which a command removed Python is lost. No error blames its template."""
    async with bench.box() as box:
        await box.exec("echo PATH=/nowhere >/home/user/.bash_profile", user="root", check=True)

        with pytest.raises(SandboxLost, match="python3"):
            await box.exec("true")


async def test_full_account_is_waited_for(bench: Bench) -> None:
    """At the cap of concurrent sandboxes, a create waits until one of ours has ended."""
    bench.server.settings["max_live"] = 1
    await bench.provider.create(SPEC, "p-other-1")
    creating = asyncio.create_task(bench.provider.create(SPEC, ID))
    while not any(entry["line"] == "POST /v2/sandboxes" for entry in bench.server.faults.log[-1:]):
        await asyncio.sleep(0.01)
    await bench.provider.kill("p-other-1")
    box = await creating
    said = (await box.exec("echo mine")).stdout
    await box.kill()

    assert (said, bench.live) == (b"mine\n", [])


async def test_proxy_that_denies_a_living_sandbox_is_asked_again(bench: Bench) -> None:
    """An early `not found` of the proxy is checked with the control plane, which decides."""
    body = {"sandboxId": "x", "message": "The sandbox was not found", "code": 502}
    async with bench.box() as box:
        bench.inject(f"{EXEC}|/health", status=502, body=body, times=2)

        assert (await box.exec("echo alive")).stdout == b"alive\n"


async def test_sandbox_that_its_proxy_denies_for_long_is_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead machine that the service calls running is given up after one minute. A silent network
    gets ten."""
    monkeypatch.setattr(e2b, "DAEMON_GONE_S", 0.3)
    async with bench.box() as box:
        body = {"sandboxId": "i1", "message": "The sandbox was not found", "code": 502}
        bench.inject(EXEC, status=502, body=body, times=None)
        impatient(monkeypatch, 5.0)

        with pytest.raises(SandboxLost):
            await box.exec("true")
