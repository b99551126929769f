"""Pulls from a registry: credentials, mirrors, rate limits, outages, a full disk, many at once.

The registry is Debian's docker-registry. Refusals by rate and outages come from `registry.Gate`, a stub.
"""

import asyncio
import hashlib
import json
import subprocess
import tarfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, ControlPlaneError, InstanceError
from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.image_pulls import LIMIT_PASSES_S
from perdure.sandboxes.providers.docker.provider import DockerProvider
from perdure.sandboxes.providers.podman import PodmanProvider
from perdure.settings.settings_tree import Settings
from tests import docker_engine, small_image
from tests.images.image_registry import PASSWORD, USER, Answer, Gate, gate_before, serving
from tests.images.podman_storage import Podman, podman_in

IMAGE = "docker.io/toy/add:1"
PATH = "toy/add"
SPEC = SandboxSpec("/opt", image=IMAGE)
LIMITED = (
    b'{"errors":[{"code":"TOOMANYREQUESTS","message":"You have reached your pull rate limit"}]}'
)
UNKNOWN = (
    b'{"errors":[{"code":"DENIED","message":"requested access to the resource is denied"},'
    b'{"code":"UNAUTHORIZED","message":"authentication required"}]}'
)
"""What Docker Hub answers for a repository that does not exist."""
DISK_MB = 4
FOREIGN = "s390x"
"""An architecture of no machine that runs these tests."""


@pytest.fixture(scope="module")
def pushed(podman: Podman, open_registry: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The registry that has IMAGE, which podman's storage has not."""
    folder = tmp_path_factory.mktemp("small")
    small_image.write_programs(folder / "root", ("bash", "sh", "env", "git"))
    archive = small_image.write_archive(folder / "root", folder / "image.tar")
    name = f"{open_registry}/{PATH}:1"
    podman("import", "--quiet", str(archive), name)
    podman("push", "--quiet", name)
    return open_registry


@pytest.fixture(scope="module")
def private(pushed: str, registry_folder: Path) -> Iterator[str]:
    """The same registry with a password."""
    with serving(registry_folder, with_password=True) as address:
        yield address


@pytest.fixture
def gate(pushed: str) -> Iterator[Gate]:
    with gate_before(pushed) as gate:
        yield gate


class Bench:
    """A provider that finds docker.io at a mirror."""

    def __init__(self, podman: Podman, home: Path, mirror: str) -> None:
        self.podman = podman
        self.mirror = mirror
        settings = Settings(home=home).changed(sandbox={"image_mirror": f"docker.io={mirror}"})
        self.provider = PodmanProvider(settings)

    async def boot(self, image: str = IMAGE, identity: str = "box") -> bytes:
        """Proof that a sandbox of the image ran."""
        async with await self.provider.create(replace(SPEC, image=image), identity) as box:
            return (await box.exec("git --version", check=True)).stdout

    async def boxes(self) -> list[str]:
        return [info.identity for info in await self.provider.list()]


@pytest.fixture
def bench(
    podman: Podman, pushed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator["Benches"]:
    for name, value in podman.env.items():
        monkeypatch.setenv(name, value)
    yield Benches(podman, tmp_path)
    podman.clear()
    (podman.folder / "auth.json").write_text("{}")


class Benches:
    def __init__(self, podman: Podman, folder: Path) -> None:
        self.podman = podman
        self.folder = folder

    def at(self, address: str) -> Bench:
        self.podman.clear()
        self.podman.trust([address])
        return Bench(self.podman, self.folder / "home", address)


async def test_mirror_serves_the_publishers_name(bench: Benches, gate: Gate) -> None:
    """A row's own name is pulled from the mirror that replaces its registry, layer by layer."""
    assert (await bench.at(gate.address).boot()).startswith(b"git version")
    assert gate.asked(f"/v2/{PATH}/manifests/1") == 1
    assert gate.asked(f"/v2/{PATH}/blobs/") == 2


@pytest.mark.parametrize("login", [{}, {"auth": b64encode(b"reader:wrong").decode()}])
async def test_refused_credentials_stop_the_run(
    bench: Benches, private: str, login: dict[str, str]
) -> None:
    """Without a login and with a wrong one: the registry, the command and the setting are named, and
    no sandbox is left."""
    here = bench.at(private)
    (here.podman.folder / "auth.json").write_text(json.dumps({"auths": {private: login}}))
    with pytest.raises(ConfigurationError) as refused:
        await here.boot()

    said = str(refused.value)
    assert said.startswith(
        f"registry {private} refused the credentials: image '{private}/{PATH}:1'"
    )
    assert f"`podman login {private}`" in said
    assert f"{IMAGE!r}) or PERDURE_SANDBOX__IMAGE_MIRROR" in said
    assert await here.boxes() == []


async def test_login_of_the_user_is_used(bench: Benches, private: str) -> None:
    """After `podman login` the private image boots."""
    here = bench.at(private)
    here.podman("login", "--username", USER, "--password", PASSWORD, private)

    assert (await here.boot()).startswith(b"git version")


async def test_credential_helper_that_is_missing_is_no_fault_of_the_row(
    bench: Benches, private: str
) -> None:
    """A login that names a program that is not installed stops the run too."""
    here = bench.at(private)
    (here.podman.folder / "auth.json").write_text(json.dumps({"credHelpers": {private: "absent"}}))

    with pytest.raises(ConfigurationError, match="docker-credential-absent"):
        await here.boot()


async def test_image_of_another_architecture_is_refused_before_a_sandbox_boots(
    bench: Benches, pushed: str, tmp_path: Path
) -> None:
    """The message names its architecture and where it would run; nothing is left."""
    here, archive = bench.at(pushed), _archive_of_a_folder(tmp_path)
    here.podman("import", "--quiet", "--arch", FOREIGN, archive, IMAGE)
    with pytest.raises(InstanceError, match=rf"toy/add:1' is for {FOREIGN}, .* in a VM of the"):
        await here.boot()

    assert await here.boxes() == []


def _foreign_archive(folder: Path) -> str:
    """IMAGE as `docker load` reads it: some versions of `docker import` ignore `--platform`."""
    layer = Path(_archive_of_a_folder(folder))
    digest = f"sha256:{hashlib.sha256(layer.read_bytes()).hexdigest()}"
    rootfs = {"type": "layers", "diff_ids": [digest]}
    config = {"architecture": FOREIGN, "os": "linux", "config": {}, "rootfs": rootfs}
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": [layer.name]}]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with tarfile.open(folder / "foreign.tar", "w") as archive:
        for name in ("manifest.json", "config.json", layer.name):
            archive.add(folder / name, name)
    return str(folder / "foreign.tar")


def _archive_of_a_folder(folder: Path) -> str:
    with tarfile.open(folder / "image.tar", "w") as archive:
        archive.add(folder, "opt", recursive=False)
    return str(folder / "image.tar")


async def test_image_that_is_not_there_ends_its_instance(bench: Benches, gate: Gate) -> None:
    """Also where a registry answers an unknown repository with 401, as Docker Hub does."""
    here = bench.at(gate.address)
    with pytest.raises(InstanceError, match=r"toy/other:1.*correct environment.image"):
        await here.boot("docker.io/toy/other:1")
    gate.play(Answer("/manifests/", 401, body=UNKNOWN))

    with pytest.raises(InstanceError, match=r"denied.*correct environment.image"):
        await here.boot()


async def test_short_limit_is_waited_for(bench: Benches, gate: Gate) -> None:
    """A 429 with `Retry-After` delays the boot, and nothing fails."""
    gate.play(Answer("/manifests/", 429, {"Retry-After": "1"}, LIMITED, left=2))

    assert (await bench.at(gate.address).boot()).startswith(b"git version")
    assert gate.asked("/manifests/1", 429) == 2


async def test_long_limit_is_left_to_pass(bench: Benches, gate: Gate) -> None:
    """A limit that lasts makes the stage try again a minute later; then the image boots."""
    here = bench.at(gate.address)
    gate.play(Answer("/manifests/", 429, {"Retry-After": "0"}, LIMITED))
    with pytest.raises(ControlPlaneError, match="pull rate limit") as limited:
        await here.boot()
    gate.play()

    assert limited.value.retry_after == LIMIT_PASSES_S
    assert (await here.boot()).startswith(b"git version")


async def test_limit_is_met_once_for_all_who_wait(bench: Benches, gate: Gate) -> None:
    """Eight sandboxes of one image use up no more of a rate limit than one."""
    here = bench.at(gate.address)
    gate.play(Answer("/manifests/", 429, {"Retry-After": "0"}, LIMITED))
    with pytest.raises(ControlPlaneError):
        await here.boot()
    alone = gate.asked("/manifests/1", 429)
    boots = [here.boot(identity=f"box-{n}") for n in range(8)]
    got = await asyncio.gather(*boots, return_exceptions=True)

    assert {type(error) for error in got} == {ControlPlaneError}
    assert gate.asked("/manifests/1", 429) == 2 * alone


@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_outage_is_tried_again(bench: Benches, gate: Gate, status: int) -> None:
    """An error of the registry blames no row, and the next try gets the image."""
    here = bench.at(gate.address)
    gate.play(Answer("/manifests/", status, body=b"<html>not found</html>"))
    with pytest.raises(ControlPlaneError):
        await here.boot()
    gate.play()

    assert (await here.boot()).startswith(b"git version")


async def test_registry_that_is_down_is_tried_again(bench: Benches) -> None:
    """No answer at all blames no row either."""
    with pytest.raises(ControlPlaneError, match="connection refused"):
        await bench.at("127.0.0.1:1").boot()


async def test_sandboxes_at_once_pull_once(bench: Benches, gate: Gate) -> None:
    """Six sandboxes of one image, in two processes' providers, transfer it once."""
    here = bench.at(gate.address)
    other = Bench(here.podman, bench.folder / "home", gate.address)
    boots = [(here, other)[n % 2].boot(identity=f"box-{n}") for n in range(6)]

    assert len(await asyncio.gather(*boots)) == 6
    assert gate.asked(f"/v2/{PATH}/manifests/1") == 1
    assert gate.asked(f"/v2/{PATH}/blobs/") == 2


@pytest.fixture
def docker(
    docker_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], DockerProvider]:
    """A provider that finds docker.io at a mirror. Its engine keeps no image between tests."""
    monkeypatch.setenv("DOCKER_HOST", docker_address)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "config"))

    def at(mirror: str) -> DockerProvider:
        settings = Settings(home=tmp_path / "home")
        return DockerProvider(settings.changed(sandbox={"image_mirror": f"docker.io={mirror}"}))

    return at


async def test_docker_names_an_image_of_another_architecture(
    docker: Callable[[str], DockerProvider], docker_address: str, tmp_path: Path
) -> None:
    """As podman does, before a container is made."""
    docker_engine.docker(docker_address, "load", "--input", _foreign_archive(tmp_path))
    try:
        with pytest.raises(InstanceError, match=f"toy/add:1' is for {FOREIGN}"):
            await docker("localhost:1").create(SPEC, "box")
    finally:
        docker_engine.docker(docker_address, "rmi", IMAGE)


async def test_docker_names_refused_credentials(
    docker: Callable[[str], DockerProvider], private: str, tmp_path: Path
) -> None:
    """With no login and a wrong one the message is podman's, with docker's command."""
    (tmp_path / "config").mkdir()
    for login in ({}, {private: {"auth": b64encode(b"reader:wrong").decode()}}):
        (tmp_path / "config/config.json").write_text(json.dumps({"auths": login}))
        with pytest.raises(ConfigurationError) as refused:
            await docker(private).create(SPEC, "box")

        assert f"registry {private} refused the credentials" in str(refused.value)
        assert f"`docker login {private}`" in str(refused.value)


async def test_docker_waits_for_limits_and_blames_rows_for_unknown_images(
    docker: Callable[[str], DockerProvider], gate: Gate
) -> None:
    """A 429 is tried again a minute later; an image that is not there ends its instance."""
    provider = docker(gate.address)
    gate.play(Answer("/manifests/", 429, {"Retry-After": "1"}, LIMITED))
    with pytest.raises(ControlPlaneError, match="pull rate limit") as limited:
        await provider.create(SPEC, "box")
    gate.play()

    assert limited.value.retry_after == LIMIT_PASSES_S
    with pytest.raises(InstanceError, match=r"correct environment\.image"):
        await provider.create(replace(SPEC, image="docker.io/toy/other:1"), "box")


async def test_docker_pulls_once_for_many(
    docker: Callable[[str], DockerProvider], gate: Gate
) -> None:
    """Four sandboxes that want an image at once transfer it once, through the mirror. The image lacks
    python3, which is what they say then."""
    provider = docker(gate.address)
    boots = [provider.create(SPEC, f"box-{n}") for n in range(4)]
    got = await asyncio.gather(*boots, return_exceptions=True)

    assert {type(error) for error in got} == {InstanceError}
    assert [str(error) for error in got if "lacks python3" not in str(error)] == []
    assert gate.asked(f"/v2/{PATH}/blobs/") == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    size = f"size={DISK_MB}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--recursive", folder], check=True)


async def test_full_disk_is_no_verdict(
    bench: Benches, pushed: str, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk without room for the image is named as such and tried again; with room it boots."""
    with podman_in(small_disk) as small:
        for name, value in small.env.items():
            monkeypatch.setenv(name, value)
        small.trust([pushed])
        here = Bench(small, bench.folder / "home", pushed)
        with pytest.raises(ControlPlaneError, match="no space left on device") as full:
            await here.boot()
        subprocess.run(["mount", "-o", "remount,size=1g", small_disk], check=True)

        assert "free space on the disk of podman's images" in str(full.value)
        assert full.value.retry_after == LIMIT_PASSES_S
        assert (await here.boot()).startswith(b"git version")
