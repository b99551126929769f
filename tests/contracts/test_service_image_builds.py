"""The builders of E2B and Daytona build a row's Dockerfile: once per content, within its time, whose fault a
failure is, and that nothing is left. `test_modal_image_builds` has Modal's.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import ConfigurationError, ControlPlaneError, InstanceError, RetryHere
from perdure.instances import build_contexts, image_preparation
from perdure.instances.environment_builder import Environments, Prepared, check_image
from perdure.instances.image_plan import AT_START, plan_images
from perdure.sandboxes import phase_specs
from perdure.sandboxes.base import Network, SandboxSpec
from perdure.sandboxes.guest.service_image_builds import ServiceImageBuilder
from perdure.sandboxes.providers.daytona import daytona_image_builds
from perdure.sandboxes.providers.e2b import e2b_image_builds
from perdure.storage.local_store import LocalStore
from perdure.types import (
    Build,
    Environment,
    Instance,
    Limits,
    Phases,
    RolloutRequest,
    Source,
    SourceKind,
)
from tests.service_harness import DAYTONA, E2B, ID, Bench, Service, benched, impatient

LIMITS = Limits(cpus=3, memory_mb=3000, disk_mb=5000)


@dataclass(frozen=True)
class Wire:
    """The requests of a build, as `Rule.match`, and what the double recorded of the builds."""

    start: str
    """Accepts the build."""
    look: str
    """Tells how it goes."""
    records: str
    """The double's attribute with a record for each build."""
    upload: str
    size: Mapping[str, int]
    """What the service is asked for with LIMITS."""


WIRES = {
    "e2b": Wire(
        "POST /v2/templates/.*/builds/",
        "GET /templates/.*/status",
        "builds",
        "PUT /uploads/",
        {"cpuCount": 4, "memoryMB": 3000, "minFreeDiskMb": 5000},
    ),
    "daytona": Wire(
        "POST /api/snapshots$",
        "GET /api/snapshots/[^/]*$",
        "snapshots",
        "(PUT|POST) /s3/",
        {"cpu": 3, "memory": 3, "disk": 5},
    ),
}


@pytest.fixture(params=[E2B, DAYTONA], ids=lambda service: service.name)
def service(request: pytest.FixtureRequest) -> Service:
    found: Service = request.param
    return found


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at a build at once, and give up one that was never started."""
    monkeypatch.setattr(e2b_image_builds, "POLL_S", 0.02)
    monkeypatch.setattr(e2b_image_builds, "UNSTARTED_S", 0.3)
    monkeypatch.setattr(daytona_image_builds, "POLL_S", 0.02)


class Builds:
    """Environments of one home whose sandboxes run at the service."""

    def __init__(self, bench: Bench, home: Path) -> None:
        self.bench, self.home = bench, home
        self.wire = WIRES[bench.service.name]
        self.store = LocalStore(home / "store")
        is_bench = home == bench.provider.settings.home
        provider = bench.provider if is_bench else bench.service.made(home)
        assert isinstance(provider, ServiceImageBuilder)
        self.provider = provider

    async def instance(
        self, lines: str, timeout_s: float = 60, phases: Mapping[str, Any] | None = None
    ) -> Instance:
        folder = self.home / "context"
        folder.mkdir(exist_ok=True, parents=True)
        (folder / "data").write_text("from the context\n")
        (folder / "Dockerfile").write_text(f"FROM docker.io/library/python:3.11\n{lines}")
        row = Instance(
            instance_id="one",
            dataset="made",
            problem_statement="x",
            source=Source(kind=SourceKind.IMAGE),
            environment=Environment(build=Build(path=str(folder), timeout_s=timeout_s)),
            phases=Phases.model_validate(phases or {}),
        )
        return await build_contexts.store_contexts(self.store, row)

    @property
    def environments(self) -> Environments:
        return Environments(self.home / "environments", self.store, self.provider)

    async def prepared(self, instance: Instance, network: Network = Network.INDEX) -> Prepared:
        environments = self.environments
        return await environments.prepare(instance, network=network, sandbox_limits=LIMITS)

    async def made(self, lines: str, timeout_s: float = 60) -> SandboxSpec:
        """The spec of a sandbox whose image is built."""
        prepared = await self.prepared(await self.instance(lines, timeout_s))
        return SandboxSpec("/testbed", image=prepared.image, limits=LIMITS)

    @property
    def records(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = getattr(self.bench.server, self.wire.records).all()
        return found

    @property
    def started(self) -> int:
        """Number of builds that the service accepted."""
        return len(self.bench.asked(self.wire.start))


@pytest.fixture
def builds(bench: Bench, tmp_path: Path) -> Builds:
    return Builds(bench, tmp_path / "home")


async def content(builds: Builds, spec: SandboxSpec, path: str) -> bytes:
    box = await builds.provider.create(spec, ID)
    try:
        return await box.read_file(path)
    finally:
        await builds.provider.kill(ID)


# -- what is built --------------------------------------------------------------------------------


async def test_a_dockerfile_is_built_with_its_context_and_booted(builds: Builds) -> None:
    """A sandbox has what COPY, ENV, WORKDIR and RUN made, and the size that its limits ask for."""
    check_image(await builds.instance(""), builds.provider)
    lines = "ARG name=made\nENV WORD=hello\nWORKDIR /app\nCOPY data .\nRUN echo $WORD >> data\n"
    spec = await builds.made(lines + 'CMD ["sleep", "infinity"]\n')

    assert await content(builds, spec, "/app/data") == b"from the context\nhello\n"
    (record,) = builds.records
    assert builds.wire.size.items() <= record["asked"].items()


async def test_ignored_files_are_not_sent(builds: Builds) -> None:
    """`.dockerignore` decides, also for builders that do not read it."""
    folder = builds.home / "context"
    (folder / "secrets" / "deep").mkdir(parents=True)
    for name in ("secrets/deep/key", "secrets/kept", "notes.md"):
        (folder / name).write_text("x")
    (folder / ".dockerignore").write_text("# no\n**/deep\n*.md\n!secrets/kept\n")
    spec = await builds.made("COPY . /app\nRUN find /app -type f | sort > /found\n")
    found = (await content(builds, spec, "/found")).decode().split()

    assert {"/app/secrets/kept", "/app/data"} <= {*found}
    assert not {"/app/secrets/deep/key", "/app/notes.md"} & {*found}


async def test_an_image_is_built_once(builds: Builds, tmp_path: Path) -> None:
    """Concurrent rollouts and those of another host share one build. A known image costs no call."""
    instance = await builds.instance("RUN sleep 0.2\n")
    other = Builds(builds.bench, tmp_path / "other")
    await asyncio.gather(*(builds.prepared(instance) for _ in range(4)))
    asked = len(builds.bench.server.faults.log)
    await builds.prepared(instance)
    known = len(builds.bench.server.faults.log)
    await other.prepared(await other.instance("RUN sleep 0.2\n"))

    assert (builds.started, known) == (1, asked)


async def test_hosts_that_race_all_get_the_image(builds: Builds, tmp_path: Path) -> None:
    """Four hosts begin at once. A build may be done twice, and never more often than there are hosts."""
    hosts = [builds, *(Builds(builds.bench, tmp_path / f"other{n}") for n in range(3))]
    specs = await asyncio.gather(*(host.made("RUN sleep 0.3; echo one > /one\n") for host in hosts))

    assert await content(hosts[-1], specs[-1], "/one") == b"one\n"
    accepted = [one for one in builds.records if one.get("steps") or one.get("runs")]
    assert 1 <= len(accepted) <= len(hosts)


async def test_other_limits_are_another_image(builds: Builds) -> None:
    """The service fixes a sandbox's size with its image."""
    instance = await builds.instance("RUN true\n")
    await builds.prepared(instance)
    await builds.environments.prepare(instance, sandbox_limits=Limits())

    assert builds.started == 2


async def test_a_row_with_a_dockerfile_may_ask_for_its_size(builds: Builds) -> None:
    """Harbor's `cpus`, `memory_mb` and `storage_mb`. A row with a ready image may not."""
    asked = {"agent": {"limits": {"cpus": 1, "memory_mb": 2048, "disk_mb": 10_240}}}
    row = await builds.instance("", phases=asked)
    request = RolloutRequest.model_validate(
        {"run_id": "r", "instance": "d/i", "sandbox": builds.provider.name}
    )
    phase_specs.check(request, row, lambda _: builds.provider)
    plain = row.model_copy(update={"environment": Environment(image="python:3.11")})
    with pytest.raises(ConfigurationError, match=r"phases\.agent\.limits"):
        phase_specs.check(request, plain, lambda _: builds.provider)


async def test_images_are_prepared_once_and_pruned(builds: Builds) -> None:
    """`perdure images prepare` builds what a run needs and says what is here, as the plan does; `prune`
    deletes from the account what no rollout has used."""
    instance = await builds.instance("RUN true\n")
    request = RolloutRequest.model_validate(
        {"run_id": "r", "instance": "d/i", "sandbox": builds.provider.name}
    )

    async def prepared() -> list[str]:
        planned = await plan_images(
            [instance], builds.provider, request, builds.store, bounds=AT_START, mirror=""
        )
        found = image_preparation.prepare_all(
            [instance], builds.environments, builds.provider, request, jobs=2
        )
        return [*planned.lines(), *[one.done + one.problem async for one in found]]

    first, again = await prepared(), await prepared()
    removed = await image_preparation.prune(builds.home, [builds.provider], unused_s=0)

    name = builds.provider.name
    assert first == [
        f"images for {name}: 0 of 1 known to this host, 1 to build",
        f"  {name} charges for builds; to build: {instance.ref}",
        "built",
    ]
    assert again == [f"images for {name}: 1 of 1 known to this host", "here"]
    assert len(removed) == 1
    assert builds.records == []


# -- whose fault a failure is ---------------------------------------------------------------------


async def test_a_failing_line_is_the_tasks_fault(builds: Builds) -> None:
    """The error has the last lines of the log. A mended Dockerfile is another image."""
    with pytest.raises(InstanceError, match=r"(?s)Dockerfile failed.*cannot compile") as caught:
        await builds.made("RUN echo cannot compile; exit 7\n")
    await builds.made("RUN echo compiled\n")

    assert "7" in str(caught.value)


async def test_an_image_that_cannot_be_pulled_is_the_tasks_fault(builds: Builds) -> None:
    row = await builds.instance("")
    (builds.home / "context" / "Dockerfile").write_text("FROM no-such-image\nRUN true\n")
    build = Build(path=str(builds.home / "context"), timeout_s=60)
    row = row.model_copy(update={"environment": Environment(build=build)})
    with pytest.raises(InstanceError, match="no-such-image"):
        await builds.prepared(await build_contexts.store_contexts(builds.store, row))


@pytest.mark.parametrize("lines", ["COPY ../../etc/passwd /x\n", "COPY out/passwd /x\n"])
async def test_files_outside_the_context_are_not_read(builds: Builds, lines: str) -> None:
    """The SDK reads the COPY lines of a stranger's Dockerfile. This host's files are not sent."""
    (builds.home / "context").mkdir(parents=True)
    if "out" in lines:
        (builds.home / "context" / "out").symlink_to("../../../../../../../../../../../../etc")
    with pytest.raises(InstanceError):
        await builds.made(lines)

    assert (builds.bench.asked(builds.wire.upload), builds.records) == ([], [])


async def test_a_missing_file_is_the_tasks_fault(builds: Builds) -> None:
    with pytest.raises(InstanceError, match="absent"):
        await builds.made("COPY absent /x\n")

    assert builds.records == []


async def test_a_build_ends_at_its_limit(builds: Builds) -> None:
    """A build beyond the row's limit is the row's error, and the service stops it."""
    with pytest.raises(InstanceError, match="more than `build_timeout_sec` = 2 s"):
        await builds.made("RUN sleep 601\n", timeout_s=2)

    assert builds.records == []


async def test_a_build_without_network_is_refused(builds: Builds) -> None:
    """The services cannot close the network of a build, so a request for that is not ignored."""
    with pytest.raises(ConfigurationError, match=r"phases\.environment\.network"):
        await builds.prepared(await builds.instance("RUN true\n"), Network.NONE)

    assert builds.started == 0


# -- faults of the service ------------------------------------------------------------------------


@pytest.mark.parametrize("boundary", ["start", "look", "upload"])
@pytest.mark.parametrize(
    "rule",
    [
        {"when": "after", "reset": True},
        {"status": 401},
        {"status": 429},
        {"status": 502, "times": 2},
    ],
    ids=["answer_lost", "401", "429", "502"],
)
async def test_a_build_survives_a_passing_fault(
    builds: Builds, boundary: str, rule: dict[str, Any]
) -> None:
    """A lost answer, a refusal or a short outage at any call is not the task's fault and starts no
    second build."""
    if boundary == "upload" and builds.bench.service is DAYTONA and rule.get("status") != 502:
        pytest.skip("object storage of Daytona: only 502, which the SDK repeats, is played")
    builds.bench.inject(getattr(builds.wire, boundary), **rule)
    spec = await builds.made("COPY data /data\nRUN sleep 0.2; echo two >> /data\n")

    assert await content(builds, spec, "/data") == b"from the context\ntwo\n"
    states = [one.get("state", one.get("status")) for one in builds.records]
    assert sum(state in ("ready", "active") for state in states) == 1


async def test_a_lasting_outage_is_not_the_tasks_fault(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so at each boundary, and the next try builds."""
    impatient(monkeypatch, 0.5)
    for boundary in ("start", "look"):
        for rule in ({"status": 503}, {"status": 429}, {"status": 401}):
            builds.bench.inject(getattr(builds.wire, boundary), times=None, **rule)
            with pytest.raises(ControlPlaneError):
                await builds.made(f"RUN echo {boundary}\n")
            assert builds.bench.server.faults.rules[0].hits
            builds.bench.server.faults.clear()
    impatient(monkeypatch, 45)
    await builds.made("RUN echo start\n")


async def test_a_build_that_the_service_ends_is_no_verdict(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An internal error of the builder is not the Dockerfile's fault: the next try builds again."""
    builds.bench.inject(builds.wire.start, kill=True, times=None)
    with pytest.raises(ControlPlaneError):
        await builds.made("RUN true\n")
    builds.bench.server.faults.clear()
    await builds.made("RUN true\n")


async def test_a_killed_worker_leaves_a_build_to_join(builds: Builds, tmp_path: Path) -> None:
    """A cancelled try leaves the build, and the next one on any host gets its image."""
    first = asyncio.create_task(builds.made("RUN sleep 1; echo one > /one\n"))
    while not builds.started:
        await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    other = Builds(builds.bench, tmp_path / "other")
    spec = await other.made("RUN sleep 1; echo one > /one\n")

    assert await content(other, spec, "/one") == b"one\n"
    assert builds.started == 1


async def test_a_restarted_service_finishes_the_build(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that the service lost and finds again is followed by the next try."""
    lines = "RUN sleep 0.5; echo one > /one\n"
    async with benched(service, tmp_path, monkeypatch) as bench:
        builds = Builds(bench, tmp_path / "home")
        task = asyncio.create_task(builds.made(lines))
        while not builds.started:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with benched(service, tmp_path, monkeypatch) as bench:
        builds = Builds(bench, tmp_path / "home")
        spec = await builds.made(lines)

        assert await content(builds, spec, "/one") == b"one\n"
        assert len(builds.records) == 1


async def test_an_image_that_the_account_lost_is_built_again(builds: Builds) -> None:
    """Nobody has to clean this host's record of an image that was deleted at the service."""
    spec = await builds.made("RUN echo one > /one\n")
    if builds.bench.service is E2B:
        for template in builds.bench.server.templates.all():
            builds.bench.server.templates.remove(template["id"])
    for record in builds.records:
        getattr(builds.bench.server, builds.wire.records).remove(record["id"])
    with pytest.raises(RetryHere, match="lacks the built image"):
        await builds.provider.create(spec, ID)
    again = await builds.made("RUN echo one > /one\n")

    assert await content(builds, again, "/one") == b"one\n"


# -- what only one of them has --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ("FROM docker.io/library/python:3.11\n", "Multi-stage"),
        ("COPY --from=docker.io/library/golang:1 /a /b\n", "line 2.*COPY --from"),
        ("RUN --mount=type=bind,target=/x true\n", "line 2: RUN --mount"),
        ('SHELL ["/bin/bash", "-c"]\n', "line 2: SHELL"),
        ("COPY --exclude=*.md . /x\n", "line 2: COPY --exclude"),
        ("ADD all.tar.gz /x\n", "line 2: ADD of an archive"),
        ("ADD https://example.com/x /x\n", "ADD from a remote URL"),
    ],
)
async def test_e2b_refuses_what_it_would_build_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, named: str
) -> None:
    """The SDK leaves such instructions out, or cannot translate them. The error names each, and nothing
    is sent."""
    async with benched(E2B, tmp_path, monkeypatch) as bench:
        builds = Builds(bench, tmp_path / "home")
        with pytest.raises(InstanceError, match=named):
            await builds.made(lines)

        assert (builds.records, bench.server.templates.all()) == ([], [])


async def test_daytona_refuses_add_and_dangling_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its SDK sends neither."""
    async with benched(DAYTONA, tmp_path, monkeypatch) as bench:
        builds = Builds(bench, tmp_path / "home")
        with pytest.raises(InstanceError, match="use COPY: ADD data /data"):
            await builds.made("ADD data /data\n")
        (builds.home / "context" / "link").symlink_to("nothing")
        with pytest.raises(InstanceError, match="link is a symbolic link to nothing"):
            await builds.made("COPY . /data\n")

        assert builds.records == []


async def test_e2b_builds_with_dockers_user_and_without_a_start_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without USER, commands run as root, as in Docker. Our own first process runs instead of CMD. A
    variable in FROM has its value."""
    async with benched(E2B, tmp_path, monkeypatch) as bench:
        builds = Builds(bench, tmp_path / "home")
        row = await builds.instance("")
        text = "ARG V=3.11\nFROM python:$V\nEXPOSE 1\nRUN true\nENTRYPOINT sleep 9\n"
        (builds.home / "context" / "Dockerfile").write_text(text)
        build = Build(path=str(builds.home / "context"))
        row = row.model_copy(update={"environment": Environment(build=build)})
        await builds.prepared(await build_contexts.store_contexts(builds.store, row))
        (record,) = builds.records

    users = [step["args"] for step in record["steps"] if step["type"] == "USER"]
    assert (record["from"], record["start_cmd"], users[-1]) == ("python:3.11", None, ["root"])


async def test_builds_wait_for_the_accounts_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E2B allows some builds at a time. The next waits, and fails no row."""
    async with benched(E2B, tmp_path, monkeypatch) as bench:
        bench.server.settings["max_builds"] = 1
        hosts = [Builds(bench, tmp_path / f"home{n}") for n in range(3)]
        await asyncio.gather(
            *(host.made(f"RUN sleep 0.1; echo {n}\n") for n, host in enumerate(hosts))
        )

        assert [one["status"] for one in hosts[0].records] == ["ready"] * 3


async def test_daytona_activates_a_snapshot_that_was_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Daytona deactivates old snapshots. The next try activates it instead of building."""
    async with benched(DAYTONA, tmp_path, monkeypatch) as bench:
        builds = Builds(bench, tmp_path / "home")
        spec = await builds.made("RUN echo one > /one\n")
        (record,) = builds.records
        bench.server.snapshots.write(record["id"], {**record, "state": "inactive"})
        with pytest.raises(RetryHere, match="lacks the built image"):
            await builds.provider.create(spec, ID)
        again = await builds.made("RUN echo one > /one\n")

        assert await content(builds, again, "/one") == b"one\n"
        assert builds.started == 1


async def test_a_failure_that_another_host_left_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed snapshot of Daytona keeps its name. It is deleted, and is no verdict about this try."""
    async with benched(DAYTONA, tmp_path, monkeypatch) as bench:
        builds = Builds(bench, tmp_path / "home")
        await builds.made("RUN echo one > /one\n")
        (record,) = builds.records
        bench.server.snapshots.write(record["id"], {**record, "state": "build_failed"})
        other = Builds(bench, tmp_path / "other")
        spec = await other.made("RUN echo one > /one\n")

        assert await content(other, spec, "/one") == b"one\n"
        assert len(other.records) == 1
