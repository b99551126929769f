"""Podman builds images from Dockerfiles: a task of `harbor task init` end to end; concurrent,
killed, failing, slow and oversized builds; the network of builds; `perdure images`.

The base image has this host's programs, without git.
"""

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from perdure.cli.main import invoke
from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    InstanceError,
    PerdureError,
    RetryHere,
)
from perdure.instances import build_contexts, instance_catalog
from perdure.instances.environment_builder import LAST_USES, Environments, check_image
from perdure.instances.image_preparation import prune
from perdure.instances.rows.row_import import import_rows
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import Network, SandboxSpec
from perdure.sandboxes.image_builds import BuildOutput, ImageBuild
from perdure.sandboxes.phase_specs import INSTALL_LIMITS
from perdure.sandboxes.providers.docker.provider import DockerProvider
from perdure.sandboxes.providers.podman import PodmanProvider
from perdure.settings.settings_tree import Settings
from perdure.stack import home_providers
from perdure.storage.local_store import LocalStore
from perdure.types import (
    Build,
    Environment,
    Instance,
    Limits,
    Source,
    SourceKind,
)
from tests import docker_engine, small_image
from tests.checkout_paths import ROOT
from tests.images import debian, podman_storage
from tests.images.played_stages import played
from tests.images.podman_storage import Podman, podman_in

BASE = "localhost/perdure-test/base:1"
KEPT = ROOT / ".perdure/test-images"
PROGRAMS = tuple(name for name in small_image.PROGRAMS if name != "git")


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    folder = tmp_path_factory.mktemp("podman")
    if missing := podman_storage.why_not(folder) or small_image.why_not():
        pytest.skip(missing)
    with podman_in(folder) as podman:
        root = folder / "root"
        small_image.write_programs(root, PROGRAMS)
        archive = small_image.write_archive(root, folder / "base.tar")
        podman("import", "--quiet", str(archive), BASE)
        yield podman


@pytest.fixture
def podman(storage: Podman, monkeypatch: pytest.MonkeyPatch) -> Podman:
    for name, value in storage.env.items():
        monkeypatch.setenv(name, value)
    return storage


class Bench:
    """One home with a store. `podman` counts the builds of its provider."""

    def __init__(self, home: Path) -> None:
        self.settings = Settings(home=home, store=str(home / "store"))
        self.store = LocalStore(home / "store")
        self.podman = CountingPodman(self.settings)

    def environments(self) -> Environments:
        root = self.settings.home / "environments"
        return Environments(root, self.store, self.podman)

    async def instance(
        self, folder: Path, dockerfile: str, timeout_s: float = 60, base: str = BASE
    ) -> Instance:
        folder.mkdir()
        (folder / "Dockerfile").write_text(f"FROM {base}\n{dockerfile}")
        made = Instance(
            instance_id="one",
            dataset="made",
            problem_statement="x",
            source=Source(kind=SourceKind.IMAGE),
            environment=Environment(build=Build(path=str(folder), timeout_s=timeout_s)),
        )
        return await build_contexts.store_contexts(self.store, made)

    async def build(
        self, instance: Instance, limits: Limits = INSTALL_LIMITS, network: Network = Network.NONE
    ) -> None:
        await self.environments().prepare(instance, limits=limits, network=network)


class CountingPodman(PodmanProvider):
    builds = 0

    async def build_image(self, build: ImageBuild) -> BuildOutput:
        self.builds += 1
        return await super().build_image(build)


@pytest.fixture
def bench(podman: Podman, tmp_path: Path) -> Bench:
    return Bench(tmp_path / "home")


async def failure(bench: Bench, instance: Instance, **options: object) -> PerdureError:
    with pytest.raises(PerdureError) as caught:
        await bench.build(instance, **options)  # type: ignore[arg-type]
    return caught.value


async def test_concurrent_sandboxes_build_an_image_once(bench: Bench, tmp_path: Path) -> None:
    """Eight sandboxes of two processes need one image at once, and it is built once. A ninth finds
    it."""
    instance = await bench.instance(tmp_path / "context", "COPY . /app\nRUN sleep 1; touch /made\n")
    other = Bench(bench.settings.home)
    await asyncio.gather(*(one.build(instance) for one in (bench, other) * 4))
    await bench.build(instance)

    assert bench.podman.builds + other.podman.builds == 1
    assert await bench.podman.image_size(instance.environment.image or "") is not None


async def test_a_failing_line_is_the_tasks_fault(
    bench: Bench, podman: Podman, tmp_path: Path
) -> None:
    """The error shows the line's output; no image and no container is left."""
    instance = await bench.instance(tmp_path / "context", "RUN echo cannot compile; exit 7\n")

    error = await failure(bench, instance)

    assert isinstance(error, InstanceError)
    assert "exit status 7" in str(error)
    assert "\ncannot compile\n" in str(error)
    assert await bench.podman.image_size(instance.environment.image or "") is None
    assert podman("ps", "--all", "--external", "--quiet") == ""


@pytest.mark.parametrize("line", ["RUNN true\n", "COPY absent /\n", "FROM $\n"])
async def test_a_wrong_dockerfile_is_the_tasks_fault(
    bench: Bench, tmp_path: Path, line: str
) -> None:
    assert isinstance(
        await failure(bench, await bench.instance(tmp_path / "c", line)), InstanceError
    )


@pytest.mark.parametrize(
    "said", ["cp: error writing: No space left on device", "unexpected EOF from the registry"]
)
async def test_a_full_disk_or_a_failing_builder_is_not_the_tasks_fault(
    bench: Bench, tmp_path: Path, said: str
) -> None:
    """The build is tried again, and the task keeps its good name."""
    instance = await bench.instance(tmp_path / "c", f"RUN echo '{said}'; exit 1\n")

    assert isinstance(await failure(bench, instance), ControlPlaneError)


async def test_an_image_of_the_mirror_is_here(bench: Bench, podman: Podman) -> None:
    """Podman keeps it under the mirror's name, and the run would be announced to pull it again."""
    name, mirror = "docker.io/demo/tool:1", "docker.io=mirror.example/hub"
    provider = PodmanProvider(bench.settings.changed(sandbox={"image_mirror": mirror}))
    before = await provider.images_here([name])
    podman("tag", BASE, "mirror.example/hub/demo/tool:1")
    after = await provider.images_here([name])

    assert (before, [*after]) == ({}, [name])


async def test_a_build_ends_at_its_limit(bench: Bench, podman: Podman, tmp_path: Path) -> None:
    """A build that ignores failures ends too, and none of its processes continues."""
    lines = "RUN sleep 601 || true\nRUN sleep 602\n"
    instance = await bench.instance(tmp_path / "context", lines, timeout_s=2)

    error = await failure(bench, instance)

    assert isinstance(error, InstanceError)
    assert "more than `build_timeout_sec` = 2 s" in str(error)
    assert podman("ps", "--all", "--external", "--quiet") == ""
    assert not running("sleep", "601")
    assert not running("sleep", "602")


async def test_an_image_over_the_limit_is_refused(bench: Bench, tmp_path: Path) -> None:
    small, large = Limits(disk_mb=64), "RUN dd if=/dev/zero of=/large bs=1M count=16\n"
    one = await bench.instance(tmp_path / "one", large * 4)
    error = await failure(bench, one, limits=small)

    assert isinstance(error, InstanceError)
    assert "phases.environment.limits.disk_mb = 64" in str(error)
    assert await bench.podman.image_size(one.environment.image or "") is None


async def test_a_build_has_no_network_but_the_index(bench: Bench, tmp_path: Path) -> None:
    """Only loopback, on which the proxy of the package index listens; its address is not in the
    image."""
    line = (
        'SHELL ["/bin/bash", "-c"]\nRUN cat /proc/net/dev; echo proxy=$https_proxy; '
        "exec 3<>/dev/tcp/127.0.0.1/18002; "
        r"printf 'CONNECT example.org:443 HTTP/1.1\r\n\r\n' >&3; head -1 <&3; exit 9"
        "\n"
    )
    instance = await bench.instance(tmp_path / "context", line)

    told = str(await failure(bench, instance, network=Network.INDEX))

    assert "builds can reach only the package index, but this one asked for example.org" in told
    assert "proxy=http://127.0.0.1:18002" in told
    assert "HTTP/1.1 403" in told
    assert "eth" not in told


async def test_a_build_reaches_its_own_list(bench: Bench, tmp_path: Path) -> None:
    """A listed host is connected to, whose server is away here; another one is refused."""
    line = (
        'SHELL ["/bin/bash", "-c"]\nRUN for place in 127.0.0.1:9 127.0.0.2:9; do '
        "exec 3<>/dev/tcp/127.0.0.1/18002; "
        r"printf 'CONNECT %s HTTP/1.1\r\n\r\n' $place >&3; head -1 <&3; done; exit 9"
        "\n"
    )
    instance = await bench.instance(tmp_path / "context", line)
    with pytest.raises(RetryHere) as failed:
        await bench.environments().prepare(
            instance, network=Network.LISTED, allowed_hosts=("127.0.0.1:9",)
        )

    assert re.findall(r"HTTP/1.1 (\d+)", str(failed.value)) == ["502", "403"]


async def test_without_a_network_the_error_says_so(bench: Bench, tmp_path: Path) -> None:
    instance = await bench.instance(
        tmp_path / "context", "RUN ! grep -q : /proc/net/route; exit 1\n"
    )

    assert "phases.environment.network=host" in str(await failure(bench, instance))


async def test_a_killed_worker_leaves_no_half_image(
    bench: Bench, podman: Podman, tmp_path: Path
) -> None:
    """Its build continues without it, and the next worker waits for that build instead of starting
    another."""
    instance = await bench.instance(tmp_path / "context", "RUN sleep 3\nRUN touch /made\n")
    await instance_catalog.save(bench.store, instance)
    worker = subprocess.Popen(
        [sys.executable, "-m", "perdure.cli.main", "images", "prepare", "made"],
        env={**os.environ, "PERDURE_HOME": str(bench.settings.home), "PYTHONPATH": f"{ROOT}/src"},
        stderr=subprocess.DEVNULL,
    )
    log = bench.settings.home / "environments/logs"
    while not any(b"sleep 3" in path.read_bytes() for path in log.glob("*.log")):
        assert worker.poll() is None
        await asyncio.sleep(0.05)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    image = instance.environment.image or ""
    assert await bench.podman.image_size(image) is None
    await bench.build(instance)

    assert await bench.podman.image_size(image) is not None
    assert [*(bench.settings.home / "environments/building").iterdir()] == []
    assert podman("ps", "--all", "--external", "--quiet") == ""


TASK = """\
schema_version = "1.4"
artifacts = []

[task]
name = "demo/hello"
version = "1.0.0"
description = ""
authors = []
keywords = []

[metadata]

[verifier]
timeout_sec = 600.0
environment_mode = "separate"
collect = []

[verifier.env]

[agent]
timeout_sec = 600.0

[environment]
network_mode = "public"
build_timeout_sec = 600.0
os = "linux"
mcp_servers = []

[environment.env]

[solution.env]
"""
"""What `harbor task init demo/hello` of Harbor 0.26 writes."""
TEST = """\
#!/bin/bash
if grep -qx hello /app/hello.txt && [ ! -e /solution ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


def write_task(folder: Path, mode: str, artifacts: str) -> Path:
    """The task that Harbor writes, on our base, with instruction, solution and tests filled in."""
    files = {
        "task.toml": TASK.replace('"separate"', f'"{mode}"').replace(
            "artifacts = []", f"artifacts = [{artifacts}]"
        ),
        "instruction.md": "Write hello into hello.txt.\n",
        "README.md": "# demo/hello\n",
        "environment/Dockerfile": f"FROM {BASE}\n\n# Install or copy.\n\nWORKDIR /app",
        "solution/solve.sh": "#!/bin/bash\necho hello > hello.txt\n",
        "tests/test.sh": TEST,
    }
    if mode == "separate":
        files["tests/Dockerfile"] = f"FROM {BASE}\n\nWORKDIR /app\n\nCOPY . /tests/\n"
    else:  # the oracle's folder is still there, as in Harbor
        files["tests/test.sh"] = TEST.replace("! -e", "-e")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("mode", "artifacts"), [("separate", '"/app", "/app/absent"'), ("shared", "")]
)
async def test_a_task_as_harbor_writes_it(
    podman: Podman, tmp_path: Path, mode: str, artifacts: str
) -> None:
    """The task is imported and both Dockerfiles are built, from images without git. The solution
    gets 1 and no change gets 0. A separate verifier sees only the artifacts."""
    services = Services(Settings(home=tmp_path / "home", store=str(tmp_path / "store")))
    report = await import_rows(services.store, write_task(tmp_path / "hello", mode, artifacts))
    (ref,) = report.refs
    gold, nothing = [
        (await played(services, ref, agent, sandbox="podman"))[0] for agent in ("oracle", "nop")
    ]

    assert (gold.outcome, gold.reward) == ("resolved", 1.0)
    assert (nothing.outcome, nothing.reward) == ("unresolved", 0.0)
    assert await services.provider("podman").list() == []


async def test_artifacts_that_cannot_be_taken_are_no_verdict_of_the_tests(
    podman: Podman, tmp_path: Path
) -> None:
    """The tests would find the image's own files, as if the agent had done nothing."""
    services = Services(Settings(home=tmp_path / "home", store=str(tmp_path / "store")))
    task = write_task(tmp_path / "hello", "separate", '"/app"')
    with (task / "solution/solve.sh").open("a") as solution:
        solution.write("head -c 3000000 /dev/urandom >large\n")
    (ref,) = (await import_rows(services.store, task)).refs
    limits = Limits(output_mb=1)
    grade, _ = await played(services, ref, "oracle", sandbox="podman", limits=limits)

    assert grade.outcome == "capture_failed"
    assert grade.reason.startswith("artifacts_too_large")


@pytest.mark.longer
async def test_toolchains_come_from_debians_source_packages(
    bench: Bench, podman: Podman, tmp_path: Path
) -> None:
    """A Dockerfile may say `apt-get build-dep`, if the builds may reach Debian's archive. (`hello` has
    a compiler's whole toolchain, and is smaller than python3.)"""
    if missing := debian.why_not():
        pytest.skip(missing)
    podman("import", "--quiet", str(debian.archive(KEPT, ("git",))), "debian:1")
    archive = "http://deb.debian.org/debian bookworm main"
    instance = await bench.instance(
        tmp_path / "context",
        f"RUN printf 'deb {archive}\\ndeb-src {archive}\\n' >/etc/apt/sources.list\n"
        "RUN apt-get update && apt-get build-dep --yes hello\n"
        "RUN gcc --version && make --version\n",
        timeout_s=900,
        base="localhost/debian:1",
    )
    environments = Environments(
        bench.settings.home / "environments",
        bench.store,
        bench.podman,
        build_hosts="deb.debian.org:80",
    )
    await environments.prepare(instance, network=Network.INDEX)

    assert await bench.podman.image_size(instance.environment.image or "") is not None


async def test_providers_without_a_builder_refuse(bench: Bench, tmp_path: Path) -> None:
    """Other providers refuse before a run, and name what to do. A mapped image is used as it is."""
    instance = await bench.instance(tmp_path / "context", "")
    for name in ("bubblewrap", "kubernetes", "apptainer"):
        with pytest.raises(ConfigurationError, match=r"podman(,| or) docker"):
            check_image(instance, home_providers.provider(bench.settings, name))
    for name in ("modal", "e2b", "daytona"):
        check_image(instance, home_providers.provider(bench.settings, name))
    known = tmp_path / "map.json"
    known.write_text(json.dumps({instance.environment.image: {"kubernetes": "pushed:1"}}))
    mapped = bench.settings.changed(sandbox={"image_map": known})
    check_image(instance, home_providers.provider(mapped, "kubernetes"))


def test_a_set_is_prepared_and_pruned(
    bench: Bench,
    podman: Podman,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A failed image stops no other, images that are here are skipped, and pruning keeps images
    that were used."""
    monkeypatch.setenv("PERDURE_HOME", str(bench.settings.home))
    tasks = tmp_path / "tasks"
    write_task(tasks / "good", "separate", "")
    for part in ("environment", "tests"):
        (tasks / "good" / part / "only").write_text("in this test\n")
    bad = write_task(tasks / "bad", "shared", "")
    (bad / "environment/Dockerfile").write_text(f"FROM {BASE}\nWORKDIR /app\nRUN false\n")

    first = invoke(["images", "prepare", str(tasks), "--json"])
    made = {one["instance"]: one for one in json.loads(capsys.readouterr().out)}
    again = invoke(["images", "prepare", str(tasks), "-i", "good", "--json"])
    found = json.loads(capsys.readouterr().out)

    assert (first, again) == (1, 0)
    assert (made["tasks/good"]["done"], made["tasks/bad"]["done"]) == ("built", "")
    assert "exit status 1" in made["tasks/bad"]["problem"]
    assert {one["done"] for one in found} == {"here"}
    assert len(found) == 2
    assert invoke(["images", "prune"]) == 0
    assert all(podman.does("image", "exists", one["image"]) for one in found)
    assert invoke(["images", "prune", "--days", "0"]) == 0
    assert not any(podman.does("image", "exists", one["image"]) for one in found)


async def test_pruning_spares_what_is_in_use(bench: Bench, tmp_path: Path) -> None:
    """An image that a rollout has used since its build, and one under an open sandbox, which keeps its
    files. An image that another engine built is not forgotten while that engine is away."""
    instance = await bench.instance(tmp_path / "context", "RUN touch /made\n")
    home, image = bench.settings.home, instance.environment.image or ""
    await bench.build(instance)
    (use,) = (home / "environments" / LAST_USES).iterdir()
    os.utime(use, (0, 0))
    await bench.build(instance)

    assert await prune(home, [bench.podman], unused_s=3600) == []
    async with await bench.podman.create(SandboxSpec("/tmp", image=image), "box") as box:
        assert await prune(home, [bench.podman], unused_s=0) == []
        assert (await box.exec("ls /made")).stdout == b"/made\n"
    assert await prune(home, [], unused_s=0) == []
    assert await prune(home, [bench.podman], unused_s=0) == [image]
    assert await bench.podman.image_size(image) is None


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerProvider]:
    """An engine that has one small image with python3 and git."""
    if missing := docker_engine.why_not():
        pytest.skip(missing)
    with docker_engine.running("overlay2") as address:
        monkeypatch.setenv("DOCKER_HOST", address)
        yield DockerProvider(Settings(home=tmp_path / "home"))


async def test_docker_builds_too(docker: DockerProvider, tmp_path: Path) -> None:
    """A good image boots, a failing build is the task's fault, and a build that hangs ends at its
    limit. A build reaches its own list of hosts and the package index, and no other host. The engine
    has no image but the Dockerfile's base image."""
    bench = Bench(tmp_path / "home")
    environments = Environments(bench.settings.home / "environments", bench.store, docker)

    async def built(
        name: str, lines: str, timeout_s: float = 60, hosts: tuple[str, ...] = ()
    ) -> SandboxSpec:
        made = await bench.instance(tmp_path / name, lines, timeout_s, base=docker_engine.IMAGE)
        network = Network.LISTED if hosts else Network.INDEX
        prepared = await environments.prepare(made, network=network, allowed_hosts=hosts)
        return SandboxSpec(prepared.workdir, image=prepared.image)

    async with await docker.create(await built("good", "RUN touch /made\n"), "box") as box:
        seen = (await box.exec("ls /made", check=True, cwd="/")).stdout
    with pytest.raises(InstanceError, match=r"(?s)non-zero code: 7") as failed:
        await built("bad", "RUN echo cannot compile; exit 7\n")
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"127.0.0.1:{server.server_port}"
        fetched = await built("listed", fetching(f"http://{here}/"), hosts=(here,))
        with pytest.raises(
            InstanceError, match=r"asked for 127\.0\.0\.1:\d+, 198\.51\.100\.7\. To"
        ):
            await built("other", fetching(f"http://{here}/", "http://198.51.100.7/"))
        server.shutdown()
    async with await docker.create(fetched, "fetched") as box:
        page = (await box.exec("cat /page; env", check=True, cwd="/")).stdout
    with pytest.raises(InstanceError, match="more than `build_timeout_sec` = 3 s"):
        await built("slow", "RUN sleep 601\n", timeout_s=3)

    assert seen == b"/made\n"
    assert b"Directory listing" in page
    assert b"proxy" not in page.lower()
    assert not docker_engine.docker(os.environ["DOCKER_HOST"], "ps", "--all", "--quiet").split()
    assert "cannot compile" in str(failed.value)
    assert not running("sleep", "601")


FETCH = """
import sys, urllib.request
page, failed = b"", False
for url in sys.argv[1:]:
    try:
        page += urllib.request.urlopen(url).read()
    except OSError:
        failed = True
open("/page", "wb").write(page)
sys.exit(failed)
"""


def fetching(*urls: str) -> str:
    """A line that asks for each of these, writes /page, and fails if one did not answer."""
    program = base64.b64encode(FETCH.encode()).decode()
    code = f"import base64; exec(base64.b64decode('{program}'))"
    return f'RUN python3 -c "{code}" {" ".join(urls)}\n'


def running(*words: str) -> bool:
    """Whether a process of this host has these words in its arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if all(word in arguments for word in words):
            return True
    return False
