"""Modal's builder builds a row's Dockerfile: once per content, within its time, and whose fault a
failure is.
"""

import asyncio
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, ControlPlaneError, InstanceError, RetryHere
from perdure.instances import build_contexts
from perdure.instances.environment_builder import Environments, Prepared, check_image
from perdure.sandboxes.base import Network, SandboxSpec
from perdure.storage.local_store import LocalStore
from perdure.types import Build, Environment, Instance, Source, SourceKind
from tests.service_harness import ID, MODAL, Bench, Service, impatient

JOIN = "/ImageJoinStreaming$"
ASK = "/ImageGetOrCreate$"


@pytest.fixture
def service() -> Service:
    return MODAL


class Builds:
    """Environments of one home whose sandboxes run at Modal."""

    def __init__(self, bench: Bench, home: Path) -> None:
        self.bench, self.home = bench, home
        self.store = LocalStore(home / "store")

    async def instance(self, lines: str, timeout_s: float = 60) -> Instance:
        folder = self.home / "context"
        folder.mkdir(exist_ok=True)
        (folder / "data").write_text("from the context\n")
        (folder / "Dockerfile").write_text(f"FROM docker.io/library/python:3.11\n{lines}")
        row = Instance(
            instance_id="one",
            dataset="made",
            problem_statement="x",
            source=Source(kind=SourceKind.IMAGE),
            environment=Environment(build=Build(path=str(folder), timeout_s=timeout_s)),
        )
        return await build_contexts.store_contexts(self.store, row)

    async def prepared(self, instance: Instance, network: Network = Network.INDEX) -> Prepared:
        environments = Environments(self.home / "environments", self.store, self.bench.provider)
        return await environments.prepare(instance, network=network)

    async def made(self, lines: str, timeout_s: float = 60) -> SandboxSpec:
        """The spec of a sandbox whose image is built."""
        prepared = await self.prepared(await self.instance(lines, timeout_s))
        return SandboxSpec(prepared.workdir, image=prepared.image)

    @property
    def runs(self) -> int:
        """Number of builds that Modal started."""
        return sum(image["runs"] for image in self.bench.server.images.all())


@pytest.fixture
def builds(bench: Bench, tmp_path: Path) -> Builds:
    return Builds(bench, tmp_path / "home")


async def test_a_dockerfile_is_built_with_its_context_and_booted(builds: Builds) -> None:
    """The builder gets the Dockerfile and the files that it copies. The sandbox boots the result."""
    check_image(await builds.instance(""), builds.bench.provider)
    async with builds.bench.box(await builds.made("COPY . /app\nRUN echo made\n")):
        (record,) = builds.bench.server.sandboxes.all()
        chain = [one["lines"] for one in builds.bench.server.images.all()]
        (mount,) = builds.bench.server.mounts.all()

    assert builds.bench.server.images.read(record["image"]) is not None
    assert ["FROM docker.io/library/python:3.11", "COPY . /app", "RUN echo made", ""] in chain
    assert "/data" in mount


async def test_an_image_is_built_once(builds: Builds, tmp_path: Path) -> None:
    """Concurrent rollouts and those of another host share one build. A known image costs no call."""
    instance = await builds.instance("RUN sleep 0.2\n")
    other = Builds(builds.bench, tmp_path / "other")
    await asyncio.gather(*(builds.prepared(instance) for _ in range(4)))
    asked = len(builds.bench.asked(ASK))
    await builds.prepared(instance)
    known = len(builds.bench.asked(ASK))
    await other.prepared(await other.instance("RUN sleep 0.2\n"))

    assert (builds.runs, known) == (1, asked)


async def test_a_failing_line_is_the_tasks_fault(builds: Builds) -> None:
    """The error has the last lines of the builder's log. A mended Dockerfile is another image."""
    with pytest.raises(InstanceError, match=r"(?s)Dockerfile failed.*cannot compile\nexit code 7"):
        await builds.made("RUN echo cannot compile; exit 7\n")
    await builds.made("RUN echo compiled\n")


async def test_a_file_outside_the_context_is_the_tasks_fault(builds: Builds) -> None:
    """The SDK reads the COPY lines of a stranger's Dockerfile. This host's files are not sent."""
    with pytest.raises(InstanceError, match="outside the build context"):
        await builds.made("COPY ../../../etc/passwd /app\nRUN true\n")

    assert builds.bench.server.files.all() == []


async def test_a_build_ends_at_its_limit(builds: Builds) -> None:
    """A build beyond the row's limit is the row's error, if Modal still answers."""
    with pytest.raises(InstanceError, match="more than `build_timeout_sec` = 1 s"):
        await builds.made("RUN sleep 601\n", timeout_s=1)


@pytest.mark.parametrize(
    ("match", "rule"),
    [
        (ASK, {"when": "after", "reset": True}),
        (JOIN, {"when": "after", "reset": True}),
        (JOIN, {"stream": "cut"}),
        (JOIN, {"status": 503, "times": 4}),
    ],
    ids=["answer_lost", "end_lost", "log_cut", "outage"],
)
async def test_a_build_survives_a_passing_fault(
    builds: Builds, match: str, rule: dict[str, object]
) -> None:
    """A lost answer or a short outage starts no second build and is not the task's fault."""
    builds.bench.inject(match, **rule)
    async with builds.bench.box(await builds.made("RUN echo one; sleep 0.2; echo two\n")):
        pass

    assert builds.runs == 1


async def test_a_build_that_modal_ends_is_started_again(builds: Builds) -> None:
    """Modal may shut a builder down. That is not the Dockerfile's fault."""
    builds.bench.inject(JOIN, kill=True)
    await builds.made("RUN echo made\n")

    assert builds.runs == 2


async def test_a_lasting_outage_is_not_the_tasks_fault(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it lasts beyond the build's time limit: the try is repeated later."""
    impatient(monkeypatch, 0.5)
    for rule in ({"status": 503}, {"hang": True}):
        builds.bench.inject(JOIN, times=None, **rule)
        builds.bench.inject("/ClientHello$", status=503, times=None)
        with pytest.raises(ControlPlaneError):
            await builds.made("RUN echo made\n", timeout_s=1 if "hang" in rule else 60)
        hits = [bool(rule.hits) for rule in builds.bench.server.faults.rules]
        builds.bench.server.faults.clear()

        assert hits[0]
    await builds.made("RUN echo made\n")


async def test_an_image_that_the_account_lost_is_built_again(builds: Builds) -> None:
    """Nobody has to clean this host's record of an image that was deleted at Modal."""
    spec = await builds.made("RUN echo made\n")
    for path in builds.bench.server.images.folder.glob("*.json"):
        path.unlink()
    with pytest.raises(RetryHere, match="lacks the built image"):
        await builds.bench.provider.create(spec, ID)
    async with builds.bench.box(await builds.made("RUN echo made\n")):
        pass


async def test_a_build_without_network_is_refused(builds: Builds) -> None:
    """Modal cannot close the network of a build, so a request for that is not ignored."""
    with pytest.raises(ConfigurationError, match=r"phases\.environment\.network"):
        await builds.prepared(await builds.instance("RUN echo made\n"), Network.NONE)

    assert builds.runs == 0
