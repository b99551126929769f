"""`perdure runs`: labels and deletion of runs, on a real server and a real store."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.common import SearchAttributePair, TypedSearchAttributes
from temporalio.service import RPCError

from perdure.cli.main import invoke
from perdure.cli.runs import run_deletion
from perdure.client import rollout_listing, search_attribute_keys, temporal_names
from perdure.errors import ConfigurationError, NotFound
from perdure.rollouts import run_label
from perdure.rollouts.run_pages import prepare_run
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import identity_of
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.storage.local_store import LocalStore
from perdure.storage.store_url import open_store
from perdure.types import RolloutRequest, RunRequest
from perdure.viewer.index_updates import RUNS, Readings
from perdure.viewer.search_index import Index, index_path
from tests.stack.wait_until import until
from tests.store_with_runs import write_rollout
from tests.workflows import dev_server

INSTANCE = "first-steps/h11-0.14.0"
SHARED = ("instances/first-steps/h11-0.14.0.json", "blobs/sha256/ab/ab")


SOON = [
    word
    for queue in ("transfer", "visibility")
    for word in ("--dynamic-config-value", f'history.{queue}ProcessorUpdateAckInterval="100ms"')
]
"""The server deletes a workflow this soon after its end, instead of half a minute."""


class Killed(Exception):
    pass


class KilledStore(LocalStore):
    """Raises before its change number `last`, so that a test can stop a command there."""

    last = 0

    async def put(self, key: str, data: bytes, *, if_match: str | None = None) -> str:
        self._count()
        return await super().put(key, data, if_match=if_match)

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        self._count()
        return await super().put_if_absent(key, data)

    async def delete(self, key: str) -> None:
        self._count()
        await super().delete(key)

    async def delete_many(self, keys: Sequence[str]) -> None:
        """A kill can hit it at any object: here after the first half."""
        if self.last == 1:
            await super().delete_many(keys[: len(keys) // 2])
        self._count()
        await super().delete_many(keys)

    def _count(self) -> None:
        self.last -= 1
        if self.last == 0:
            raise Killed


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with dev_server.serving(*SOON) as client:
        yield client


@pytest.fixture
def command(
    client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Runs a command line; returns its exit code and what it printed."""
    for name, value in {
        "PERDURE_HOME": str(tmp_path),
        "TEMPORAL_ADDRESS": client.service_client.config.target_host,
        "TEMPORAL_NAMESPACE": client.namespace,
    }.items():
        monkeypatch.setenv(name, value)

    def call(*args: str) -> tuple[int, str]:
        capsys.readouterr()
        code = invoke(args)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


async def _ended_run(client: Client, run_id: str) -> None:
    """Objects and closed workflows of a run with one rollout, whose turns are still journaled."""
    store = open_store(load_settings())
    for key in SHARED:
        await store.put(key, b"{}")
    run = RunRequest(run_id=run_id, instances=(INSTANCE,), rollout={"agent": "nop"})
    request = run.rollout_request(INSTANCE)
    await write_rollout(store, run_id)
    document = {"request": run.model_dump(mode="json"), "instances": 1}
    await store.put(store_keys.run(run_id), json.dumps(document).encode())
    await store.put(store_keys.run_instances(run_id), json.dumps([INSTANCE]).encode())
    await store.put(store_keys.manifest(run_id), b'{"episodes": []}')
    session = identity_of(run_id, request.workflow_id, "agent", 2)
    await store.put(store_keys.journal_record(session, 1), b"turn")
    await _closed_workflows(client, request)


async def _closed_workflows(client: Client, request: RolloutRequest) -> None:
    known = TypedSearchAttributes([SearchAttributePair(search_attribute_keys.RUN, request.run_id)])
    for workflow, workflow_id, attributes in (
        (temporal_names.RUN, f"run/{request.run_id}", known),
        (temporal_names.SHARD, f"run/{request.run_id}/shard/0", TypedSearchAttributes([])),
        (temporal_names.ROLLOUT, request.workflow_id, search_attribute_keys.of_rollout(request)),
    ):
        await client.start_workflow(
            workflow, id=workflow_id, task_queue="nothing-polls-this", search_attributes=attributes
        )
        await client.get_workflow_handle(workflow_id).terminate()

    async def listed() -> bool:
        found = await rollout_listing.all_of_run(client, request.run_id)
        return [one.close_time is not None for one in found] == [True] * 3

    await until(listed, "the server lists the closed workflows")


async def _keys(prefix: str = "") -> list[str]:
    return [key async for key in open_store(load_settings()).list(prefix)]


async def test_a_label_is_shown_and_filters_lists(
    client: Client, command: Callable[..., tuple[int, str]]
) -> None:
    """Name and tags are in every list and report; an archived run is in neither list nor viewer."""
    for run_id in ("one", "two"):
        await _ended_run(client, run_id)

    edit = ["runs", "edit", "one", "--name", "Baseline", "--note", "lr 3e-5", "--tag", "paper"]
    assert (await asyncio.to_thread(command, *edit))[0] == 0
    await asyncio.to_thread(command, "runs", "edit", "one", "two", "--tag", "b", "--untag", "c")
    _, status = await asyncio.to_thread(command, "status", "one")
    _, tagged = await asyncio.to_thread(command, "status", "--tag", "paper", "--json")
    _, report = await asyncio.to_thread(command, "report", "one")
    assert "Baseline [paper, b]" in status
    assert "Note      lr 3e-5" in status
    assert [run["run_id"] for run in json.loads(tagged)["runs"]] == ["one"]
    assert "Baseline" in report

    await asyncio.to_thread(command, "runs", "archive", "two")
    _, listed = await asyncio.to_thread(command, "status")
    _, archived = await asyncio.to_thread(command, "status", "--archived")
    assert ("one: " in listed, "two: " in listed) == (True, False)
    assert ("one: " in archived, "two: " in archived) == (False, True)
    assert await _viewed() == ["one"]
    await asyncio.to_thread(command, "runs", "unarchive", "two")
    assert "two: " in (await asyncio.to_thread(command, "status"))[1]

    code, unknown = await asyncio.to_thread(command, "runs", "edit", "nosuch", "--tag", "a")
    assert (code, "no run 'nosuch'" in unknown) == (1, True)


async def _viewed() -> list[str]:
    """The runs that the viewer lists."""
    settings = load_settings()
    store = open_store(settings)
    index = Index(index_path(settings.home, store.url))
    readings = Readings(store, index)
    await readings.bring(RUNS, wait=30.0)
    await readings.aclose()
    index.close()
    return _indexed()


async def test_a_deleted_run_leaves_nothing(
    client: Client, command: Callable[..., tuple[int, str]]
) -> None:
    """Its objects, turns, label, workflows and rows of the index go. Instances and blobs stay, and so
    do other runs, also one whose name begins alike."""
    for run_id in ("one", "one-more"):
        await _ended_run(client, run_id)
    await asyncio.to_thread(command, "runs", "edit", "one", "--tag", "a")
    before = await _keys()
    assert await _viewed() == ["one", "one-more"]

    dry = await asyncio.to_thread(command, "runs", "delete", "one", "--dry-run", "--json")
    assert await _keys() == before
    code, printed = await asyncio.to_thread(command, "runs", "delete", "one", "--yes")

    (told,) = json.loads(dry[1])
    gone = set(before) - set(await _keys())
    assert code == 0, printed
    assert (told["objects"], told["workflows"], len(told["sessions"])) == (len(gone), 3, 1)
    assert told["bytes"] > 0
    assert await rollout_listing.all_of_run(client, "one") == []
    assert not [key for key in await _keys() if "runs/one/" in key or "run-labels" in key]
    assert set(SHARED) <= set(await _keys())
    assert len([key for key in await _keys("journal/")]) == 1
    assert len(await rollout_listing.all_of_run(client, "one-more")) == 3
    assert _indexed() == ["one-more"]
    assert not (load_settings().home / "store" / "runs" / "one").exists()
    for name, told in (("one", "no run 'one'"), ("x' OR 'a' = 'a", "not a run id")):
        code, again = await asyncio.to_thread(command, "runs", "delete", name, "--yes")
        assert (code, told in again) == (1, True)


def _indexed() -> list[str]:
    """The runs in the viewer's index, as it is."""
    settings = load_settings()
    index = Index(index_path(settings.home, open_store(settings).url))
    found = [one.run for one in index.totals()]
    index.close()
    return found


async def test_an_open_run_is_not_deleted(
    client: Client, command: Callable[..., tuple[int, str]]
) -> None:
    """Neither if only a straggler is open; the message says what to cancel."""
    await _ended_run(client, "one")
    straggler = RolloutRequest(run_id="one", instance=INSTANCE, sample_index=1, agent="nop")
    await client.start_workflow(
        temporal_names.ROLLOUT,
        id=straggler.workflow_id,
        task_queue="nothing-polls-this",
        search_attributes=search_attribute_keys.of_rollout(straggler),
    )

    async def listed() -> bool:
        return len(await rollout_listing.all_of_run(client, "one")) == 4

    await until(listed, "the server lists the straggler")
    before = await _keys()

    code, printed = await asyncio.to_thread(command, "runs", "delete", "one", "--yes")

    assert code == 2
    assert f"run one is open: {straggler.workflow_id}. `perdure cancel`" in printed
    assert await _keys() == before


async def test_a_killed_deletion_leaves_a_run_that_nothing_takes_for_whole(
    client: Client, command: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    """Stopped before any of its changes: the run is as it was, or no start, report or list accepts it;
    and the same command deletes the rest."""
    for last in range(1, 12):
        await _ended_run(client, "one")
        settings = load_settings()
        store = KilledStore(open_store(settings).root)  # type: ignore[attr-defined]  # a local store
        found = await run_deletion.find(store, client, "one")
        store.last = last
        try:
            await run_deletion.delete(settings, store, client, found)
        except Killed:
            if last > 1:
                await _is_refused(command, settings)
            found = await run_deletion.find(store, client, "one")
            await run_deletion.delete(settings, store, client, found)
            left = [key for key in await _keys() if not key.startswith(SHARED)]
            assert left == [], last
        else:
            break
    else:
        pytest.fail("the deletion never came to its end")
    assert last > 5
    with pytest.raises(RPCError):
        await client.get_workflow_handle("run/one").describe()
    with pytest.raises(NotFound):
        await run_deletion.find(store, client, "one")


async def _is_refused(command: Callable[..., tuple[int, str]], settings: Settings) -> None:
    told = run_label.half_deleted("one")
    for line in (["status", "one"], ["report", "one"], ["export", "one", "-o", "-"]):
        code, printed = await asyncio.to_thread(command, *line)
        assert (code, told in printed) == (2, True), (line, printed)
    assert told in (await asyncio.to_thread(command, "status"))[1]
    run = RunRequest(run_id="one", instances=(INSTANCE,), rollout={"agent": "nop"})
    with pytest.raises(ConfigurationError, match="half deleted"):
        await prepare_run(Services(settings), run)
