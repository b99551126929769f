"""Tests in the agent's own sandbox see all that it left, and what runs there."""

from pathlib import Path

import pytest

from perdure.rollouts.sandbox.health_check import Unhealthy, wait_until_healthy
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Collect, Grading, Healthcheck, Limits
from tests.images import harbor_oracle
from tests.images.played_stages import played
from tests.integration.one_row import ROW, save_row

SOLUTION = """\
echo it >/tmp/elsewhere
mkfifo /tmp/ask
(cat /tmp/ask >/tmp/answer) </dev/null >/dev/null 2>&1 &
"""
TESTS = "grep -q it /tmp/elsewhere && timeout 20 bash -c 'echo hi >/tmp/ask'"


@pytest.fixture
def services(tmp_path: Path) -> Services:
    settings = Settings(home=tmp_path / "home", store=str(tmp_path / "store"))
    if missing := BubblewrapProvider(settings).check():
        pytest.skip(missing[0])
    return Services(settings)


async def test_tests_meet_the_agents_processes_and_files(
    services: Services, tmp_path: Path
) -> None:
    """The diff is empty: the result is a file in /tmp and a process that reads from a pipe. Commands
    that collect run before artifacts are taken; the failure of one changes nothing."""
    collect = (Collect(command="exit 3"), Collect(command="cp /tmp/elsewhere collected"))
    grading = Grading(protocol="eval_cmd", eval_cmd=TESTS, in_place=True, collect=collect)
    artifacts: dict[str, tuple[str, ...]] = {"/testbed/collected": ()}
    script = {"solve.sh": SOLUTION.encode()}
    await save_row(
        services, tmp_path / "tree", grading=grading, artifacts=artifacts, gold_script=script
    )
    asked = {"sandbox": "bubblewrap", "limits": Limits()}
    gold, folder = await played(services, ROW, "oracle", **asked)
    nothing, _ = await played(services, ROW, "nop", **asked)

    assert (gold.outcome, nothing.outcome) == ("resolved", "unresolved")
    packed = (await services.store.get(f"{folder}/artifacts.tar")).data
    assert list(harbor_oracle.members(packed)) == ["/testbed/collected"]
    assert await services.provider("bubblewrap").list() == []


async def test_failures_in_the_start_period_do_not_count(
    services: Services, tmp_path: Path
) -> None:
    tries = "echo x >>tries; [ $(wc -l <tries) = 3 ]"
    times = {"interval_s": 0.01, "start_interval_s": 0.01, "retries": 1}
    provider = services.provider("bubblewrap")
    async with await provider.create(SandboxSpec("/testbed"), "box") as box:
        await wait_until_healthy(box, None)
        check = Healthcheck.model_validate(
            {"command": ("bash", "-c", tries), "start_period_s": 60.0, **times}
        )
        await wait_until_healthy(box, check)
        late = check.model_copy(update={"start_period_s": 0.0})
        with pytest.raises(Unhealthy, match=r"failed 1 times in a row") as caught:
            await wait_until_healthy(box, late)
        found = await box.exec("wc -l <tries", check=True)

    assert found.stdout.strip() == b"4"
    assert caught.value.boundary == "sandbox"
