"""A power cut: what is made once and believed for ever is whole, or it is made again."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perdure import durable_files
from perdure.agents import tool_cache
from perdure.durable_files import DAMAGED, KEPT_S, MANIFEST
from perdure.engines.engine_roster import StoredRoster
from perdure.errors import ConfigurationError
from perdure.home_folder import load_secrets
from perdure.instances.base_trees import pack
from perdure.instances.environment_builder import Environments, environment_key
from perdure.rollouts.sandbox.host_term import HostTerm
from perdure.sandboxes.base import Mount, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.base import put_blob
from perdure.storage.local_store import LocalStore
from perdure.types import Environment, Instance, Source, SourceKind
from tests.power_cut import FragileDisk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FragileDisk]:
    disk = FragileDisk(tmp_path)
    yield disk
    disk.remove()


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let this process forget what it has checked, as one does that starts after the cut."""
    return lambda: monkeypatch.setattr(durable_files, "_whole", set())


async def instance_of(store: LocalStore, folder: Path) -> Instance:
    tree = folder / "tree"
    tree.mkdir()
    (tree / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    return Instance(
        instance_id="calc-1",
        dataset="d",
        problem_statement="-",
        source=Source(kind=SourceKind.BLOB, key=await put_blob(store, pack(tree))),
        environment=Environment(),
    )


async def test_an_environment_survives_a_power_cut(
    disk: FragileDisk, tmp_path: Path, restarted: Callable[[], None]
) -> None:
    """Right after its build, when nothing but the store's own syncs has reached the disk."""
    home = disk.path / "home"
    store = LocalStore(home / "store")
    environments = Environments(
        home / "environments", store, BubblewrapProvider(Settings(home=home))
    )
    instance = await instance_of(store, tmp_path)
    made = await environments.prepare(instance)
    await store.put("progress", b"a write that commits the names of the folders")
    disk.cut_power()
    restarted()
    found = await environments.prepare(instance)

    assert found == made
    assert found.tree is not None
    assert (found.tree / "calc.py").read_text() == "def add(a, b):\n    return a - b\n"
    assert (found.tree / ".git" / "HEAD").read_text().startswith("ref: ")


async def test_a_damaged_environment_is_built_again(
    tmp_path: Path, restarted: Callable[[], None]
) -> None:
    """A file of it is empty: the next rollout builds it, and none is judged by what is left."""
    store = LocalStore(tmp_path / "store")
    environments = Environments(
        tmp_path / "environments", store, BubblewrapProvider(Settings(home=tmp_path))
    )
    instance = await instance_of(store, tmp_path)
    made = await environments.prepare(instance)
    ready = tmp_path / "environments" / "ready" / environment_key(instance)
    (ready / "tree" / "calc.py").write_bytes(b"")
    restarted()

    assert await environments.prepare(instance) == made
    assert (ready / "tree" / "calc.py").read_text() == "def add(a, b):\n    return a - b\n"
    assert not [*(tmp_path / "environments" / "building").iterdir()]


async def test_a_sandbox_keeps_the_environment_that_another_worker_builds_again(
    tmp_path: Path, restarted: Callable[[], None]
) -> None:
    """An older build made it, without a manifest. Its sandbox still has every file, and the files go
    once no sandbox can use them."""
    store = LocalStore(tmp_path / "store")
    provider = BubblewrapProvider(Settings(home=tmp_path))
    environments = Environments(tmp_path / "environments", store, provider)
    instance = await instance_of(store, tmp_path)
    made = await environments.prepare(instance)
    assert made.tree is not None
    mount = Mount(made.tree, "/opt/mounted")
    spec = SandboxSpec(workdir=made.workdir, tree=made.tree, mounts=(mount,), env=made.env)
    ready = made.tree.parent
    async with await provider.create(spec, "p-running-1") as sandbox:
        (ready / MANIFEST).unlink()
        restarted()
        await environments.prepare(instance)
        seen = await sandbox.exec(f"cat {made.workdir}/calc.py /opt/mounted/calc.py", check=True)
    [old] = ready.parent.glob(f"{DAMAGED}*")
    long_ago = time.time() - KEPT_S - 1
    os.utime(old, (long_ago, long_ago))
    shutil.rmtree(ready)
    restarted()
    await environments.prepare(instance)

    assert seen.stdout == b"def add(a, b):\n    return a - b\n" * 2
    assert not old.exists()


async def test_a_damaged_tool_is_built_again(tmp_path: Path, restarted: Callable[[], None]) -> None:
    """An agent's program whose file is cut is fetched again, not started."""

    def build(folder: Path) -> None:
        folder.mkdir()
        (folder / "agent").write_text("#!/bin/sh\n")

    folder = await tool_cache.built(tmp_path, "agent", "recipe", build)
    (folder / "agent").write_bytes(b"")
    restarted()

    assert await tool_cache.built(tmp_path, "agent", "recipe", build) == folder
    assert (folder / "agent").read_text() == "#!/bin/sh\n"


def test_small_files_survive_a_power_cut(disk: FragileDisk) -> None:
    """The host's term and the home's secret are what they were."""
    settings = Settings(home=disk.path / "home")
    term = HostTerm(disk.path / "home" / "run" / "term", 3600.0)
    term.begin(7)
    secret = load_secrets(settings).newest
    disk.cut_power()

    assert term.number == 7
    assert load_secrets(settings).newest == secret


async def test_an_empty_state_file_counts_as_absent(tmp_path: Path) -> None:
    """A power cut of an earlier version left them: the home serves without a person."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "term").touch()
    (run / "secret").touch()
    store = LocalStore(tmp_path / "store")
    await store.put("engines/x.json", b"")
    term = HostTerm(run / "term", 3600.0)
    assert term.number == 0
    term.confirm()

    assert term.is_confirmed
    assert len(load_secrets(Settings(home=tmp_path)).newest) >= 16
    assert (await StoredRoster(store, "engines/x.json").read()).engines == ()


async def test_a_damaged_list_of_engines_is_named(tmp_path: Path) -> None:
    """The error names the object and what to do."""
    store = LocalStore(tmp_path / "store")
    await store.put("engines/x.json", b'{"engines": [')

    with pytest.raises(ConfigurationError, match=r"engines/x\.json, is damaged: delete it"):
        await StoredRoster(store, "engines/x.json").read()
