"""What a run's images will cost: what podman, docker and the registry say before it is what a pull then
transfers.

The registry is Debian's docker-registry behind `Gate`, a stub that logs requests and refuses some.
"""

import asyncio
import json
import platform
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from perdure.cli.main import invoke
from perdure.instances import build_contexts, image_plan
from perdure.instances.image_plan import Bounds, ImagePlan, plan_images
from perdure.sandboxes import registry_client
from perdure.sandboxes.base import SandboxProvider
from perdure.sandboxes.image_architecture import NAMES
from perdure.sandboxes.image_builds import LocalImageBuilder
from perdure.sandboxes.providers.docker.provider import DockerProvider
from perdure.sandboxes.providers.podman import PodmanProvider
from perdure.settings.settings_tree import Settings
from perdure.stack import home_providers
from perdure.storage.local_store import LocalStore
from perdure.types import Build, Environment, Instance, RolloutRequest, Source, SourceKind
from tests import docker_engine, small_image
from tests.images.image_registry import PASSWORD, USER, Answer, Gate, gate_before, serving
from tests.images.podman_storage import Podman

NAMES_OF = ("base", "one", "two")
"""`one` and `two` are `base` and a layer of their own."""
TIME = Bounds(60.0, 100)
FOREIGN = "s390x"
PATCH = "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
SWE_BENCH_ROW = {
    "instance_id": "demo__demo-1",
    "repo": "demo/demo",
    "base_commit": "0" * 40,
    "problem_statement": "x",
    "patch": PATCH,
    "test_patch": PATCH,
    "FAIL_TO_PASS": ["test_x"],
    "PASS_TO_PASS": [],
    "test_cmd": "pytest",
}


@pytest.fixture(scope="module")
def pushed(podman: Podman, open_registry: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The registry that has the images. Podman has none of them."""
    folder = tmp_path_factory.mktemp("plan")
    small_image.write_programs(folder / "root", ("bash", "sh", "env"))
    archive = small_image.write_archive(folder / "root", folder / "image.tar")
    podman("import", "--quiet", str(archive), f"{open_registry}/plan/base:1")
    for name, size in (("one", 30_000), ("two", 50_000)):
        (folder / name).mkdir()
        (folder / name / "data").write_bytes(name.encode() * size)
        (folder / name / "Dockerfile").write_text(
            f"FROM {open_registry}/plan/base:1\nCOPY data /\n"
        )
        podman("build", "--quiet", "--tag", f"{open_registry}/plan/{name}:1", str(folder / name))
    for name in NAMES_OF:
        podman("push", "--quiet", f"{open_registry}/plan/{name}:1")
    both = f"{open_registry}/plan/both:1"
    podman("manifest", "create", both)
    for arch, name in ((FOREIGN, "two"), (NAMES[platform.machine()], "one")):
        podman("manifest", "add", "--arch", arch, both, f"{open_registry}/plan/{name}:1")
    podman("manifest", "push", "--all", both, f"docker://{both}")
    podman.clear()
    return open_registry


@pytest.fixture(scope="module")
def private(pushed: str, registry_folder: Path) -> Iterator[str]:
    """The same registry with a password."""
    with serving(registry_folder, with_password=True) as address:
        yield address


@pytest.fixture
def gate(pushed: str, podman: Podman, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """What docker.io is replaced by."""
    for name, value in podman.env.items():
        monkeypatch.setenv(name, value)
    with gate_before(pushed) as gate:
        podman.trust([gate.address])
        yield gate
    podman.clear()


class Bench:
    """Rows and their plan at one provider."""

    def __init__(self, provider: SandboxProvider, home: Path, mirror: str) -> None:
        self.provider, self.home = provider, home
        self.store = LocalStore(home / "store")
        self.mirror = f"docker.io={mirror}"

    async def plan(
        self, *images: str, builds: Sequence[Instance] = (), bounds: Bounds = TIME
    ) -> ImagePlan:
        rows = [_row(number, Environment(image=name)) for number, name in enumerate(images)]
        request = {"run_id": "r", "instance": "made/0", "sandbox": self.provider.name}
        return await plan_images(
            [*rows, *builds],
            self.provider,
            RolloutRequest.model_validate(request),
            self.store,
            bounds=bounds,
            mirror=self.mirror,
        )

    async def built(self, number: int, dockerfile: str) -> Instance:
        folder = self.home / f"context{number}"
        folder.mkdir(parents=True)
        (folder / "Dockerfile").write_text(dockerfile)
        row = _row(number, Environment(build=Build(path=str(folder))))
        return await build_contexts.store_contexts(self.store, row)


def _row(number: int, environment: Environment) -> Instance:
    return Instance(
        instance_id=f"row{number}",
        dataset="made",
        problem_statement="x",
        source=Source(kind=SourceKind.IMAGE),
        environment=environment.model_copy(update={"workdir": "/opt"}),
    )


def images(*names: str) -> list[str]:
    return [f"docker.io/plan/{name}:1" for name in names]


@pytest.fixture
def engine(
    request: pytest.FixtureRequest, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    settings = Settings(home=tmp_path / "home").changed(
        sandbox={"image_mirror": f"docker.io={gate.address}"}
    )
    if request.param == "podman":
        yield Bench(PodmanProvider(settings), tmp_path, gate.address)
        return
    address = request.getfixturevalue("docker_address")
    monkeypatch.setenv("DOCKER_HOST", address)
    yield Bench(DockerProvider(settings), tmp_path, gate.address)
    for image in docker_engine.docker(address, "images", "--quiet").split():
        docker_engine.docker(address, "rmi", "--force", image)


@pytest.fixture
def bench(gate: Gate, tmp_path: Path) -> Bench:
    return Bench(
        home_providers.provider(Settings(home=tmp_path), "kubernetes"), tmp_path, gate.address
    )


def transferred(gate: Gate, registry_folder: Path) -> int:
    """Bytes of the layers that were fetched."""
    digests = {line.split()[1].rpartition("sha256:")[2] for line in gate.log if "/blobs/" in line}
    blobs = registry_folder / "data/docker/registry/v2/blobs/sha256"
    contents = [(blobs / one[:2] / one / "data").read_bytes() for one in digests]
    return sum(len(content) for content in contents if not content.startswith(b"{"))


@pytest.mark.parametrize("engine", ["podman", "docker"], indirect=True)
async def test_the_plan_is_what_pulls_then_transfer(
    engine: Bench, gate: Gate, registry_folder: Path
) -> None:
    """Two images share a layer, which counts once, and not at all once an image here has it. The plan
    itself transfers no layer."""
    assert isinstance(engine.provider, LocalImageBuilder)
    every = await engine.plan(*images(*NAMES_OF))
    assert transferred(gate, registry_folder) == 0
    await engine.provider.pull_image(*images("base"))
    base = transferred(gate, registry_folder)
    gate.log.clear()
    rest = await engine.plan(*images(*NAMES_OF))
    assert transferred(gate, registry_folder) == 0
    gate.log.clear()
    for name in images("one", "two"):
        await engine.provider.pull_image(name)
    own = transferred(gate, registry_folder)
    done = await engine.plan(*images(*NAMES_OF))

    assert (every.here, every.disk_bytes, every.asked) == (0, 0, 3)
    assert every.download_bytes == base + own
    assert (rest.here, rest.to_pull, rest.download_bytes) == (1, images("one", "two"), own)
    assert rest.disk_bytes == await engine.provider.image_size(f"{engine.mirror[10:]}/plan/base:1")
    assert (rest.unknown, done.here, done.to_pull) == ({}, 3, [])
    assert rest.lines()[0].startswith(f"images for {engine.provider.name}: 1 of 3 here (at most ")
    assert rest.lines()[0].endswith(" on disk), 2 to pull")
    assert len(rest.lines()) == 2


@pytest.mark.parametrize("engine", ["podman", "docker"], indirect=True)
async def test_a_dockerfile_costs_its_missing_base(engine: Bench) -> None:
    """Two tasks to build share a base image, which is asked about once; one that is here costs nothing."""
    assert isinstance(engine.provider, LocalImageBuilder)
    (wanted,) = images("one")
    rows = [await engine.built(n, f"FROM {wanted}\nRUN echo {n}\n") for n in range(2)]
    base = await engine.plan(wanted)
    before = await engine.plan(builds=rows)
    await engine.provider.pull_image(wanted)
    after = await engine.plan(builds=rows)

    assert (before.to_build, before.asked) == (["made/row0", "made/row1"], 1)
    assert before.download_bytes == base.download_bytes
    assert before.download_bytes
    assert "2 to build" in before.lines()[0]
    assert before.lines()[1].endswith("without what RUN lines download")
    assert (len(after.to_build), after.asked, after.download_bytes) == (2, 0, 0)


async def test_only_this_hosts_architecture_counts(bench: Bench) -> None:
    one, both = [await bench.plan(*images(name)) for name in ("one", "both")]

    assert both.download_bytes == one.download_bytes
    assert one.download_bytes


async def test_nodes_of_a_cluster_are_unknown(bench: Bench) -> None:
    """The plan does not claim that nothing is there."""
    said = (await bench.plan(*images("one"))).lines()

    assert said[0] == ("images for kubernetes: 1 needed, and which of them are there is unknown")
    assert said[1].startswith("  download to each node that lacks them: ")


async def test_apptainer_knows_its_files(gate: Gate, tmp_path: Path) -> None:
    """A SIF or a folder on this host is here; a name of a registry is to be pulled."""
    (tmp_path / "image.sif").touch()
    provider = home_providers.provider(Settings(home=tmp_path / "home"), "apptainer")
    found = await Bench(provider, tmp_path, gate.address).plan(
        str(tmp_path / "image.sif"), *images("one")
    )

    assert (found.here, found.to_pull, found.asked) == (1, images("one"), 1)


class Silent:
    """A registry that accepts connections and never answers."""

    def __init__(self) -> None:
        self.connections = 0
        self.address = ""

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await reader.read()
        writer.close()


@pytest.fixture
async def silent() -> AsyncIterator[Silent]:
    registry = Silent()
    async with await asyncio.start_server(registry.accept, "127.0.0.1", 0) as server:
        registry.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield registry


async def test_a_registry_that_hangs_is_left(
    bench: Bench, silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few requests wait for it at once, then it is not asked again. Other registries' sizes are told."""
    monkeypatch.setattr(registry_client, "ANSWER_S", 0.3)
    address = silent.address
    found = await bench.plan(*images("one"), *(f"{address}/x/{n}:1" for n in range(40)))

    assert (found.asked, found.unknown) == (1, {f"{address} did not answer within 0.3 s": 40})
    assert 1 <= silent.connections <= image_plan.REQUESTS_AT_ONCE
    assert "at least" in found.lines()[1]
    assert found.lines()[2].startswith("  download unknown for 40: ")
    assert json.loads(json.dumps(asdict(found)))["unknown"] == found.unknown  # `--dry-run --json`


async def test_the_plan_ends_in_time(bench: Bench, silent: Silent) -> None:
    """Unknown is not 0: no download is told if nothing answered."""
    found = await bench.plan(f"{silent.address}/x/1:1", bounds=Bounds(0.3, 10))

    assert found.unknown == {"no answer within 0.3 s": 1}
    assert (len(found.lines()), found.download_bytes) == (2, None)


async def test_a_large_set_is_asked_about_in_part(bench: Bench, gate: Gate) -> None:
    found = await bench.plan(*images(*NAMES_OF), bounds=Bounds(60.0, 2))

    assert (found.asked, found.unknown) == (2, {"only the first 2 are asked about": 1})
    assert gate.asked("/manifests/") == 2


async def test_docker_hubs_pulls_are_spared(
    bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker Hub counts each question as a pull, of which it allows few. (The gate plays it.)"""
    monkeypatch.setattr(image_plan, "HUB", gate.address)
    monkeypatch.setattr(image_plan, "MOST_OF_HUB", 1)
    found = await bench.plan(*images(*NAMES_OF))

    assert (found.asked, gate.asked("/manifests/")) == (1, 1)
    assert [count for why, count in found.unknown.items() if "as pulls" in why] == [2]


@pytest.mark.parametrize(
    "played",
    [(404, "lacks the image", 3), (429, "limits the rate", 1), (503, "status 503", 1)],
)
async def test_a_refusal_is_told(
    bench: Bench, gate: Gate, monkeypatch: pytest.MonkeyPatch, played: tuple[int, str, int]
) -> None:
    """A registry that limits requests or is down is not asked about the next image."""
    monkeypatch.setattr(image_plan, "REQUESTS_AT_ONCE", 1)
    status, said, asked = played
    gate.play(Answer("/manifests/", status))
    found = await bench.plan(*images(*NAMES_OF))

    assert [(said in why, count) for why, count in found.unknown.items()] == [(True, 3)]
    assert gate.asked("/manifests/", status) == asked


@pytest.mark.parametrize("logged_in", [False, True])
async def test_a_stored_login_is_used(
    podman: Podman, private: str, gate: Gate, tmp_path: Path, logged_in: bool
) -> None:
    podman.trust([gate.address, private])
    if logged_in:
        podman("login", "--username", USER, "--password", PASSWORD, private)
    provider = home_providers.provider(Settings(home=tmp_path), "kubernetes")
    found = await Bench(provider, tmp_path, private).plan(*images("one"))
    (podman.folder / "auth.json").write_text("{}")

    refused: Mapping[str, int] = {} if logged_in else {f"{private} refused the login": 1}
    assert (found.asked, found.unknown) == (int(logged_in), refused)


def test_the_commands_print_the_plan(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`perdure run --dry-run`, and `perdure images prepare` before it starts, print the same lines."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PERDURE_SANDBOX__IMAGE_MIRROR", f"docker.io={gate.address}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**SWE_BENCH_ROW, "image": images("one")[0]}))

    assert invoke(["run", str(rows), "--agent", "nop", "--sandbox", "podman", "--dry-run"]) == 0
    dry = capsys.readouterr().err
    (line,) = [
        one for one in dry.splitlines() if "images for podman: 0 of 1 here, 1 to pull" in one
    ]
    assert "images prepare rows --sandbox podman" in dry
    run = ["run", str(rows), "--agent", "nop", "--sandbox", "podman", "--dry-run", "--json"]
    assert invoke(run) == 0
    (document,) = json.loads(capsys.readouterr().out)["images"]
    assert invoke(["images", "prepare", str(rows)]) == 0
    prepared = capsys.readouterr().err

    assert document["download_bytes"] > 0
    assert line in prepared
    assert prepared.index("download to this host") < prepared.index(": pulled in")
