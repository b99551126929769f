"""Environments are built once, by one process, whole or not at all; with real sandboxes."""

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, InstanceError, MissingDependency
from perdure.instances import base_trees
from perdure.instances.environment_builder import START, Environments
from perdure.instances.recipes import release_pairs
from perdure.instances.recipes.dataset_recipe import load_recipe
from perdure.sandboxes.base import SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.local import LocalProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.base import put_blob
from perdure.storage.local_store import LocalStore
from perdure.types import Environment, Instance, Source, SourceKind

PATIENCE_S = 60.0
PREPARE = """
import asyncio, sys
from pathlib import Path
from perdure.instances.environment_builder import START, Environments
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore
from perdure.types import Instance

async def main():
    home = Path(sys.argv[1])
    store, provider = LocalStore(home / "store"), BubblewrapProvider(Settings(home=home))
    environments = Environments(home / "environments", store, provider)
    instance = Instance.model_validate_json(sys.argv[2])
    preparing = asyncio.create_task(environments.prepare(instance))
    done, _ = await asyncio.wait([preparing], timeout=0.5)
    if not done:
        print("waiting", flush=True)
    print((await preparing).base_commit, flush=True)

asyncio.run(main())
"""


class Home:
    """A worker's folder, and pipes through which install lines talk to the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(folder / "store")
        self.provider = BubblewrapProvider(Settings(home=folder))
        self.environments = Environments(folder / "environments", self.store, self.provider)
        caches = folder / "environments" / "caches" / START.read_text().strip()
        self.shared = caches / "d"  # what every build of the dataset can write to
        self.shared.mkdir(parents=True)

    async def instance(self, *install: str, files: dict[str, bytes] | None = None) -> Instance:
        tree = self.folder / "tree"
        for name, data in (files or {"thing.py": b"x = 1\r\n"}).items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes(data)
        return Instance(
            instance_id="thing-1",
            dataset="d",
            problem_statement="-",
            source=Source(
                kind=SourceKind.BLOB, key=await put_blob(self.store, base_trees.pack(tree))
            ),
            environment=Environment(install=install),
        )

    def start(self, instance: Instance) -> subprocess.Popen[bytes]:
        """Another process that prepares the same instance."""
        argv = [sys.executable, "-c", PREPARE, str(self.folder), instance.model_dump_json()]
        return subprocess.Popen(argv, stdout=subprocess.PIPE)

    def pipe(self, name: str) -> int:
        os.mkfifo(self.shared / name)
        return os.open(self.shared / name, os.O_RDWR | os.O_NONBLOCK)

    @property
    def builds(self) -> int:
        return len((self.shared / "builds").read_text().splitlines())


def heard(pipe: int) -> None:
    assert select.select([pipe], [], [], PATIENCE_S)[0], "the build never got there"
    os.read(pipe, 100)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    home = Home(tmp_path / "home")
    if missing := home.provider.check():
        pytest.skip("; ".join(missing))
    yield home
    for info in asyncio.run(_all(home)):
        asyncio.run(home.provider.kill(info))


async def _all(home: Home) -> list[str]:
    return [info.identity for info in await home.provider.list()]


async def test_install_lines_on_a_host_that_cannot_run_them_stop_the_run(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the chart's pods bubblewrap may not run. The row is named with what to do; a row without
    install lines needs no builder."""
    row, plain = await home.instance("true"), await home.instance()
    monkeypatch.setattr(home.provider, "check", lambda: ["bubblewrap cannot make a sandbox: EPERM"])
    with pytest.raises(MissingDependency, match=r"d/thing-1 has install lines.*EPERM.*an image"):
        await home.environments.prepare(row)

    assert (await home.environments.prepare(plain)).tree is not None


async def test_without_isolation_there_are_no_artifacts(home: Home) -> None:
    """Their absolute paths would be those of the host's own files."""
    provider = LocalProvider(Settings(home=home.folder))
    instance = (await home.instance()).model_copy(update={"artifacts": {"/etc": ()}})

    with pytest.raises(ConfigurationError, match="use --sandbox bubblewrap"):
        await Environments(home.folder / "e", home.store, provider).prepare(instance)


@pytest.mark.longer
async def test_two_processes_build_once(home: Home) -> None:
    """While one process builds, another waits with a free event loop and then shares the result."""
    started, go = home.pipe("started"), home.pipe("go")
    instance = await home.instance(
        "echo x >> $UV_CACHE_DIR/builds",
        "echo x > $UV_CACHE_DIR/started",
        "read -r _ < $UV_CACHE_DIR/go",
    )
    first = home.start(instance)
    heard(started)
    second = home.start(instance)
    assert second.stdout is not None
    assert second.stdout.readline() == b"waiting\n"
    os.write(go, b"x\n")
    commits = [process.communicate()[0].split()[-1] for process in (first, second)]

    assert commits[0] == commits[1]
    assert home.builds == 1


@pytest.mark.longer
async def test_killed_build_is_built_again(home: Home) -> None:
    """After kill -9 in the middle of a build the next build works."""
    started = home.pipe("started")
    instance = await home.instance(
        "echo x >> $UV_CACHE_DIR/builds",
        "[ -e $UV_CACHE_DIR/killed ] || { echo x > $UV_CACHE_DIR/started; sleep infinity; }",
        "echo built > built.txt",
    )
    first = home.start(instance)
    heard(started)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    (home.shared / "killed").touch()
    prepared = await home.environments.prepare(instance)

    assert prepared.tree is not None
    assert (prepared.tree / "built.txt").read_text() == "built\n"
    assert home.builds == 2
    assert list((home.folder / "environments" / "building").iterdir()) == []
    assert not [info for info in await home.provider.list() if info.alive]


async def test_the_first_builds_after_a_start_share_a_cache(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each removes the caches of earlier starts. None removes the one that another has just made."""
    instance = await home.instance()
    other = Environments(home.environments.root, home.store, home.provider)
    caches = home.shared.parent.parent
    (caches / "earlier start").mkdir()
    shutil.rmtree(home.shared.parent)
    listed = Path.iterdir

    def list_late(folder: Path) -> Iterator[Path]:
        monkeypatch.undo()
        (other._cache_of(instance) / "wheel").touch()
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", list_late)
    shared = home.environments._cache_of(instance)

    assert [path.name for path in shared.iterdir()] == ["wheel"]
    assert list(caches.iterdir()) == [shared.parent]


async def test_prepared_twice_is_built_once(home: Home) -> None:
    """A second rollout of the instance finds its environment ready."""
    instance = await home.instance("echo x >> $UV_CACHE_DIR/builds")
    first = await home.environments.prepare(instance)

    assert await home.environments.prepare(instance) == first
    assert home.builds == 1


async def test_build_output_belongs_to_the_base(home: Home) -> None:
    """Files that the install wrote into the repository are committed, so they are no edit of the agent."""
    instance = await home.instance("mkdir thing.egg-info && echo x > thing.egg-info/PKG-INFO")
    prepared = await home.environments.prepare(instance)
    spec = SandboxSpec(prepared.workdir, prepared.tree, mounts=prepared.mounts, env=prepared.env)
    async with await home.provider.create(spec, "p-look-1") as sandbox:
        seen = await sandbox.exec(
            "git -c safe.directory=* status --porcelain && git -c safe.directory=* rev-parse HEAD",
            check=True,
        )
        files = await sandbox.exec("ls thing.egg-info && cat thing.py", check=True)

    assert prepared.base_commit is not None
    assert seen.stdout == prepared.base_commit.encode() + b"\n"
    assert files.stdout == b"PKG-INFO\nx = 1\r\n"


async def test_base_commit_is_the_same_on_every_worker(home: Home, tmp_path: Path) -> None:
    """Two workers without a common store build the same base commit."""
    other = Home(tmp_path / "elsewhere")
    commits = []
    for worker in (home, other):
        instance = await worker.instance("echo $REPO > where.txt", "python3 -c 'import thing'")
        commits.append((await worker.environments.prepare(instance)).base_commit)

    assert commits[0] == commits[1]


async def test_install_lines_share_one_shell(home: Home) -> None:
    """A variable that one install line exports is set in the next, as in the scripts of the rows."""
    instance = await home.instance("export COLOUR=red", "echo $COLOUR > colour.txt")
    prepared = await home.environments.prepare(instance)

    assert prepared.tree is not None
    assert (prepared.tree / "colour.txt").read_text() == "red\n"


async def test_failing_install_shows_its_end(home: Home) -> None:
    """A failed install is the row's error: its last lines and the path of the whole log."""
    instance = await home.instance("echo fine", "echo the reason >&2; exit 3", "echo never")
    with pytest.raises(InstanceError) as caught:
        await home.environments.prepare(instance)
    message = str(caught.value)
    log = next((home.folder / "environments" / "logs").iterdir())

    assert "d/thing-1: `install` failed (exit code 3)" in message
    assert "the reason" in message
    assert str(log) in message
    assert b"fine" in log.read_bytes()
    assert b"never" not in log.read_bytes()


async def test_a_missing_python_is_named(home: Home) -> None:
    """If this machine lacks a row's interpreter, the error says so and nothing is downloaded."""
    instance = await home.instance("true")
    wanted = instance.environment.model_copy(update={"python": "3.2"})

    with pytest.raises(
        InstanceError, match=r"`environment\.python`: no Python 3\.2 starts.*Install Python 3\.2"
    ):
        await home.environments.prepare(instance.model_copy(update={"environment": wanted}))


async def test_local_sandbox_refuses_install_lines(home: Home) -> None:
    """Without isolation there is no /opt/perdure/venv to install into; the error names bubblewrap."""
    environments = Environments(
        home.folder / "e",
        home.store,
        LocalProvider(Settings(home=home.folder, sandbox={"allow_local": True})),
    )

    with pytest.raises(ConfigurationError, match="bubblewrap instead of local"):
        await environments.prepare(await home.instance("true"))


async def test_tree_in_an_image_is_refused_without_images(home: Home) -> None:
    """If the provider cannot run images, a row whose tree is in an image is refused by name."""
    instance = (await home.instance()).model_copy(
        update={
            "source": Source(kind=SourceKind.IMAGE),
            "environment": Environment(image="docker.io/x:1"),
        }
    )

    with pytest.raises(ConfigurationError, match=r"d/thing-1 is in the image docker\.io/x:1"):
        await home.environments.prepare(instance)


@pytest.mark.registry
async def test_released_package(home: Home) -> None:
    """A real release is installed editable from the base tree and imports without network."""
    recipe = load_recipe(Path(__file__).parents[2] / "datasets" / "first-steps")
    pair = next(pair for pair in recipe.pairs if pair.package == "h11")
    instance = Instance(
        instance_id="h11",
        dataset="d",
        problem_statement="-",
        source=Source(kind=SourceKind.PYPI_SDIST, requirement=f"h11=={pair.before}"),
        environment=release_pairs.environment_of(pair, Path(), datetime.now(UTC)),
    )
    prepared = await home.environments.prepare(instance)
    spec = SandboxSpec(prepared.workdir, prepared.tree, mounts=prepared.mounts, env=prepared.env)
    async with await home.provider.create(spec, "p-look-1") as sandbox:
        ran = await sandbox.exec("python -c 'import h11, sys; print(h11.__file__, sys.prefix)'")
        tested = await sandbox.exec("pytest -q -p no:cacheprovider h11/tests/test_util.py")
        status = await sandbox.exec("git -c safe.directory=* status --porcelain --ignored")

    assert ran.stdout == b"/testbed/h11/__init__.py /opt/perdure/venv\n"
    assert tested.status.ok
    assert status.stdout == b""
