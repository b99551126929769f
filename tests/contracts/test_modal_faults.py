"""What only Modal has: fixed time limits, GPUs, tags. `test_service_faults` tests the other failures."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from modal_proto import api_pb2
from pydantic import ValidationError

from perdure.errors import ConfigurationError, RateLimited, SandboxLost
from perdure.sandboxes import phase_specs
from perdure.sandboxes.base import Network
from perdure.sandboxes.guest.service_provider import ServiceProvider
from perdure.sandboxes.providers.modal import provider as modal
from perdure.settings.settings_tree import ModalSettings, Settings
from perdure.types import Instance, Limits, Phases, RolloutRequest, Source, SourceKind
from tests.service_harness import ID, MODAL, SPEC, Bench, Service, impatient


@pytest.fixture
def service() -> Service:
    return MODAL


def provider(home: Path, **settings: str) -> ServiceProvider:
    return modal.ModalProvider(Settings(home=home, modal=ModalSettings(**settings)))


# -- making ---------------------------------------------------------------------------------------


async def test_limits_and_network_are_sent(bench: Bench) -> None:
    """Memory and CPUs are hard limits. The network is closed unless the spec opens it."""
    access = api_pb2.NetworkAccess
    sent = []
    for network in (Network.NONE, Network.HOST):
        async with bench.box(replace(SPEC, network=network)):
            (record,) = bench.server.sandboxes.all()
            sent.append((record["memory_mb"], record["cpus"], record["network"]))

    assert sent == [(4096, 2.0, access.BLOCKED), (4096, 2.0, access.OPEN)]


async def test_sandbox_with_a_gpu_is_made_found_and_ended(bench: Bench, tmp_path: Path) -> None:
    """The SDK uses another set of calls for sandboxes with a GPU. The identity still finds them."""
    gpus = provider(tmp_path / "gpus", gpu="A100:2")
    box = await gpus.create(SPEC, ID)
    await (await gpus.attach(ID)).write_file("mark", b"one")
    again = await gpus.create(SPEC, ID)
    seen, records = await again.read_file("mark"), bench.server.sandboxes.all()
    listed = [info.identity for info in await gpus.list()]
    await box.kill()

    assert ([record["gpu"] for record in records], seen, listed) == (["A100"], b"one", [ID])
    assert bench.live == []


async def test_gpu_of_the_spec_replaces_that_of_the_settings(bench: Bench, tmp_path: Path) -> None:
    """A request or a row may name its GPU. A sandbox of this identity with another is refused."""
    gpus, spec = provider(tmp_path / "gpus", gpu="T4"), replace(SPEC, limits=Limits(gpu="A100:2"))
    box = await gpus.create(spec, ID)
    with pytest.raises(ConfigurationError, match="GPU"):
        await gpus.create(SPEC, ID)
    (record,) = bench.server.sandboxes.all()
    await box.kill()

    assert record["gpu"] == "A100"


async def test_limits_that_modal_can_give(bench: Bench) -> None:
    """GPUs of requests and rows, and the disk that a row asks for, which every sandbox has. A cap on
    the disk is refused."""

    def check(limits: dict[str, object], row: dict[str, object]) -> None:
        fields = {"run_id": "r", "instance": "d/i", "sandbox": "modal", "limits": limits}
        source = Source(kind=SourceKind.IMAGE)
        phases = Phases.model_validate({"agent": {"limits": row}})
        instance = Instance(
            instance_id="i", dataset="d", problem_statement="x", source=source, phases=phases
        )
        asked = RolloutRequest.model_validate(fields)
        phase_specs.check(asked, instance, lambda _: bench.provider)

    check({"gpu": "T4"}, {"gpu": "A100-80GB:2", "disk_mb": 10_240})
    with pytest.raises(ConfigurationError, match=r"limits\.disk_mb"):
        check({"disk_mb": 10_240}, {})
    for wrong in ("two GPUs", "T4:0", ":2"):
        with pytest.raises(ValidationError, match="gpu"):
            check({"gpu": wrong}, {})


async def test_another_spec_under_the_same_identity_is_refused(bench: Bench) -> None:
    """An identity has one spec. Another spec is a configuration error and changes nothing."""
    async with bench.box():
        with pytest.raises(ConfigurationError, match="another image"):
            await bench.provider.create(replace(SPEC, workdir="/elsewhere"), ID)

        assert len(bench.live) == 1


async def test_full_account_adopts_what_it_has_and_refuses_the_rest(bench: Bench) -> None:
    """A full account gives back the identity's own sandbox. A new one is RateLimited at once, if the
    caller shares a queue."""
    bench.provider.waits_at_caps = False
    bench.server.settings["max_live"] = 1
    async with bench.box() as box:
        again = await bench.provider.create(SPEC, ID)
        with pytest.raises(RateLimited) as refused:
            await bench.provider.create(SPEC, "p-other-1")

    assert (again.identity, refused.value.limit) == (box.identity, "concurrency")


async def test_rate_limit_is_told_at_once_with_its_time(bench: Bench) -> None:
    """The SDK does not wait for a rate limit by itself, because callers share the account's queue."""
    bench.provider.waits_at_caps = False
    bench.server.settings["creates_per_s"] = 1
    others = [f"p-other-{number}" for number in range(9)]
    refusals = await asyncio.gather(
        *(bench.provider.create(SPEC, other) for other in others), return_exceptions=True
    )
    told = [error.retry_after for error in refusals if isinstance(error, RateLimited)]
    for other in others:
        await bench.provider.kill(other)

    assert set(told) == {1.0}


async def test_image_that_modal_cannot_pull_is_named(bench: Bench) -> None:
    """The error names the image and says what to do about one that needs credentials."""
    with pytest.raises(ConfigurationError, match="credentials"):
        await bench.provider.create(replace(SPEC, image="example.com/no-such-image:1"), ID)

    assert bench.live == []


async def test_image_name_is_no_way_into_a_dockerfile(bench: Bench) -> None:
    """The SDK writes the name into a Dockerfile, and rows come from strangers."""
    with pytest.raises(ConfigurationError, match="is not an image name"):
        await bench.provider.create(replace(SPEC, image="python\nRUN make me"), ID)

    assert bench.asked("ImageGetOrCreate") == []


async def test_image_of_the_account_is_used_by_its_id(bench: Bench) -> None:
    """`im-...` names an image that the account has built. Nothing is pulled for it."""
    bench.server.images.write("im-mine", {"lines": []})
    async with bench.box(replace(SPEC, image="im-mine")):
        used = [record["image"] for record in bench.server.sandboxes.all()]

    assert (used, bench.asked("ImageGetOrCreate")) == (["im-mine"], [])


async def test_image_without_python_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first process that cannot start blames the image and is no lost sandbox."""
    monkeypatch.setattr(modal, "FIRST", "exit 127")
    bench.inject(MODAL.create, state="ended")
    with pytest.raises(ConfigurationError, match="lacks python3"):
        await bench.provider.create(SPEC, ID)


# -- time -----------------------------------------------------------------------------------------


async def test_longer_life_than_modal_allows_is_refused(bench: Bench) -> None:
    """Modal ends each sandbox after 24 hours. The error names the setting."""
    with pytest.raises(ConfigurationError, match="PERDURE_SANDBOX__TTL_S"):
        await bench.provider.create(replace(SPEC, ttl_s=25 * 3600), ID)


async def test_deadline_moves_up_to_modals_limit(bench: Bench) -> None:
    """Every sandbox has Modal's longest limit, so `touch` can move its deadline up to that."""
    async with bench.box() as box:
        (record,) = bench.server.sandboxes.all()
        await box.touch(30 * 3600)
        (info,) = await bench.provider.list()

    assert record["ends"] - record["created"] == 24 * 3600
    assert info.expires - info.created == pytest.approx(24 * 3600)


# -- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cut", "truncated"])
async def test_a_stream_that_lies_changes_no_result(bench: Bench, how: str) -> None:
    """An output stream that is cut, or lacks its end, changes no result and runs nothing twice."""
    async with bench.box() as box:
        bench.inject("/TaskExecStdioRead$", stream=how, times=2)
        result = await box.exec("echo ran >>count; echo out; exit 7")

        assert (result.status.code, result.stdout, await bench.count(box)) == (
            7,
            b"out\n",
            b"ran\n",
        )


async def test_order_is_no_argument_of_a_process(bench: Bench) -> None:
    """Other users of a sandbox can list arguments, so an order and its secrets are on standard input."""
    started = []
    async with bench.box() as box:
        await box.exec("true", env={"KEY": "hidden-value"})
        started += [command.argv for command in bench.server._commands.values()]

    assert {tuple(argv) for argv in started} == {("sh", "-c", "exec sh 2>&1")}


async def test_sandbox_that_stays_silent_is_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox that the service calls running, but that does not answer for long, is given up."""
    monkeypatch.setattr(modal, "UNREACHABLE_S", 0.3)
    async with bench.box() as box:
        bench.inject(MODAL.execute, status=409, times=None)
        impatient(monkeypatch, 5.0)

        with pytest.raises(SandboxLost, match="has not answered"):
            await box.exec("true")
        bench.server.faults.clear()
