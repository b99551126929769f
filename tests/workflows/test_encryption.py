"""Encrypted payloads on a real server: what it stores, what users' tools show, key rotation."""

import asyncio
import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.worker import Replayer

from perdure.cli.runs.rollout_progress import current_step
from perdure.client import temporal_names
from perdure.client.payload_encryption import EncryptingCodec, Keys, KeyUnknown
from perdure.client.sdk import Perdure
from perdure.client.temporal_client import connect, data_converter
from perdure.errors import ConfigurationError
from perdure.rollouts.activity_messages import AgentRun
from perdure.settings.settings_tree import Settings
from perdure.stack.codec_server import create_app
from perdure.stack.command_server import serving
from perdure.stack.stack_plan import temporal_binary
from perdure.types import AgentEnd, RolloutRequest, RolloutStatus
from tests.stack.wait_until import until
from tests.workflows import dev_server
from tests.workflows.activity_gate import Gate
from tests.workflows.scripted_stages import Stages
from workers.workflow_worker import WORKFLOWS, checking_runner

pytestmark = pytest.mark.temporal

OLD, NEW = b"o" * 32, b"n" * 32
MARK = "moonlight-over-kyoto"
"""A text that occurs only in a request, a heartbeat or a failure."""
UI = "http://127.0.0.1:8233"
TOKEN = "t" * 64


def _write(file: Path, **keys: bytes) -> None:
    """Write the keys; the first one encrypts."""
    lines = [f"{name} {base64.b64encode(key).decode()}" for name, key in keys.items()]
    draft = file.with_suffix(".draft")
    draft.write_text("# keys\n" + "\n".join(lines) + "\n")
    draft.replace(file)


@pytest.fixture(autouse=True)
def _only_what_a_test_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPORAL_CONFIG_FILE", "/nonexistent/temporal.toml")


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "codec.keys"
    _write(file, old=OLD)
    return file


def _settings(client: Client, file: Path) -> Settings:
    address = client.service_client.config.target_host
    temporal = {"address": address, "namespace": client.namespace, "codec_keys_file": file}
    return Settings(home=file.parent, temporal=temporal)


def _request(run_id: str = "hidden") -> RolloutRequest:
    return RolloutRequest(run_id=run_id, instance="toy/add-1", agent="nop", model=MARK)


def _payloads(found: Any) -> list[dict[str, Any]]:
    """All payloads in a history's JSON."""
    if isinstance(found, list):
        return [one for item in found for one in _payloads(item)]
    if not isinstance(found, dict):
        return []
    if "encoding" in found.get("metadata", {}):
        return [found]
    return [
        one for key, item in found.items() if key != "searchAttributes" for one in _payloads(item)
    ]


def _text(payloads: list[dict[str, Any]]) -> str:
    return b" ".join(base64.b64decode(one["data"]) for one in payloads).decode(errors="replace")


def _key_ids(history: str) -> set[str]:
    ids = [one["metadata"].get("encryption-key-id", "") for one in _payloads(json.loads(history))]
    return {base64.b64decode(one).decode() for one in ids}


async def test_the_server_stores_nothing_that_a_request_or_a_failure_says(
    keys_file: Path, tmp_path: Path
) -> None:
    """Neither the history nor the server's database contains text of a request, failure or memo."""
    database = tmp_path / "temporal.db"
    with dev_server.running("--db-filename", str(database)) as server:
        client = await connect(settings=_settings(await server.client(), keys_file))
        stages = Stages()
        tries = []

        async def fails_once(_: Any) -> AgentRun:
            tries.append(1)
            if len(tries) == 1:
                raise ApplicationError(f"no such key: {MARK}", type="RetryHere")
            return AgentRun(end=AgentEnd.FINISHED)

        stages.override["run_agent"] = fails_once
        async with stages.at_work(client):
            rollout = await Perdure(client).start_rollout(_request())
            episode = await rollout.result()
        (listed,) = await Perdure(client).rollouts("hidden")
        stored = b"".join(file.read_bytes() for file in tmp_path.glob("temporal.db*"))
        history = (await rollout.handle.fetch_history()).to_json()

    assert (episode.status, len(tries)) == (RolloutStatus.GRADED, 2)
    assert listed.episode == episode  # the memo opens again
    assert MARK.encode() not in stored
    assert b"rollout/hidden/add-1/0" in stored  # ids stay readable
    assert _key_ids(history) == {"old"}


async def test_a_person_still_reads_why_a_step_is_tried_again(
    client: Client, keys_file: Path
) -> None:
    """`perdure status` shows the failure's text, although the server has it encrypted."""
    encrypting = await connect(settings=_settings(client, keys_file))
    stages = Stages()

    async def fails(_: Any) -> AgentRun:
        raise ApplicationError(MARK, type="RetryHere")

    stages.override["run_agent"] = fails
    async with stages.at_work(encrypting):
        rollout = await Perdure(encrypting).start_rollout(_request())

        async def told() -> bool:
            return MARK in await current_step(encrypting, rollout.handle.id)

        await until(told, "the failure is shown")
        described = await rollout.handle.describe()
        (step,) = described.raw_description.pending_activities
        await rollout.handle.terminate()

    assert MARK not in str(step.last_failure)


async def test_keys_rotate_while_workflows_are_open(client: Client, keys_file: Path) -> None:
    """A rollout that started with the old key ends with the new one, without a restart of any
    process."""
    settings = _settings(client, keys_file)
    encrypting = await connect(settings=settings)
    stages, gate = Stages(), Gate()
    stages.override["run_agent"] = gate.agent
    async with stages.at_work(encrypting):
        rollout = await Perdure(encrypting).start_rollout(_request())
        await gate.until_running(1)
        _write(keys_file, new=NEW, old=OLD)
        gate.open.set()
        episode = await rollout.result()
    history = await rollout.handle.fetch_history()
    replayer = Replayer(
        workflows=WORKFLOWS,
        workflow_runner=checking_runner(),
        data_converter=data_converter(settings),
        debug_mode=True,
    )
    replayed = await replayer.replay_workflow(history, raise_on_replay_failure=False)

    assert episode.status is RolloutStatus.GRADED
    assert _key_ids(history.to_json()) == {"old", "new"}
    assert replayed.replay_failure is None


@pytest.mark.longer
async def test_who_lacks_a_key_waits_for_it(
    client: Client, keys_file: Path, tmp_path: Path
) -> None:
    """Workers without the newest key lose no rollout: it continues when their file has the key."""
    ahead = tmp_path / "ahead.keys"
    _write(ahead, new=NEW, old=OLD)
    behind = await connect(settings=_settings(client, keys_file))
    starter = await connect(settings=_settings(client, ahead))
    async with Stages().at_work(behind):
        rollout = await Perdure(starter).start_rollout(_request())

        async def stuck() -> bool:
            events = (await rollout.handle.fetch_history()).events
            return any(event.HasField("workflow_task_failed_event_attributes") for event in events)

        await until(stuck, "a worker has met the unknown key")
        _write(keys_file, new=NEW, old=OLD)
        episode = await rollout.result()

    assert episode.status is RolloutStatus.GRADED


async def test_what_was_written_in_plain_text_is_still_read(
    client: Client, keys_file: Path
) -> None:
    """Encryption may be turned on while plaintext rollouts are open, and `temporal` users may type
    JSON."""
    encrypting = await connect(settings=_settings(client, keys_file))
    async with Stages().at_work(encrypting):
        handle = await client.start_workflow(
            temporal_names.ROLLOUT,
            {"run_id": "plain", "instance": "toy/add-1", "agent": "nop"},
            id="rollout/plain/add-1/0",
            task_queue=temporal_names.WORKFLOWS_QUEUE,
        )
        episode = await Perdure(encrypting).rollout(handle.id).result()

    assert episode.status is RolloutStatus.GRADED


@pytest.mark.parametrize(
    "text",
    ["", "# none\n", "old\n", "old c2hvcnQ=\n", "old !!!\n", f"a {'b' * 44} c\n"],
)
def test_a_file_without_good_keys_is_refused(tmp_path: Path, text: str) -> None:
    """The error names the file and the format of a line, and shows no key."""
    file = tmp_path / "keys"
    file.write_text(text)

    with pytest.raises(ConfigurationError, match=str(file)) as refused:
        Keys(file)
    assert "b" * 44 not in str(refused.value)


async def test_a_changed_payload_does_not_open(keys_file: Path) -> None:
    """A payload that was tampered with, or that names another key, raises an error and yields no
    data."""
    _write(keys_file, old=OLD, new=NEW)
    codec = EncryptingCodec(Keys(keys_file))
    (payload,) = await data_converter(Settings()).encode([MARK])
    (hidden,) = await codec.encode([payload])
    damaged, renamed, unknown = (type(hidden).FromString(hidden.SerializeToString()) for _ in "123")
    damaged.data = hidden.data[:-1] + bytes([hidden.data[-1] ^ 1])
    renamed.metadata["encryption-key-id"] = b"new"
    unknown.metadata["encryption-key-id"] = b"lost"

    assert await codec.decode([hidden]) == [payload]
    for one in (damaged, renamed):
        with pytest.raises(ConfigurationError):
            await codec.decode([one])
    with pytest.raises(KeyUnknown, match="'lost'"):
        await codec.decode([unknown])


# --- the codec server ------------------------------------------------------------------------------


async def _ask(port: int, path: str, body: Any, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False) as http:
        return await http.post(f"http://127.0.0.1:{port}{path}", json=body, headers=headers)


async def test_the_web_ui_and_the_temporal_command_read_a_history(
    client: Client, keys_file: Path
) -> None:
    """Encrypted payloads that are sent like the UI's come back readable, and `temporal show` works
    too."""
    settings = _settings(client, keys_file)
    encrypting = await connect(settings=settings)
    async with Stages().at_work(encrypting):
        rollout = await Perdure(encrypting).start_rollout(_request())
        await rollout.result()
    history = json.loads((await rollout.handle.fetch_history()).to_json())
    _write(keys_file, new=NEW, old=OLD)
    app = create_app(EncryptingCodec(Keys(keys_file)), TOKEN, [UI])
    async with serving(app, "127.0.0.1", 0) as port:
        from_ui = {"origin": UI, "x-namespace": client.namespace}
        body = {"payloads": _payloads(history)}
        answer = await _ask(port, f"/{TOKEN}/decode", body, **from_ui)
        shown = await asyncio.to_thread(
            subprocess.run,
            [
                *(temporal_binary(), "workflow", "show", "-w", rollout.handle.id, "-o", "json"),
                *("--address", settings.temporal.address, "--namespace", client.namespace),
                *("--codec-endpoint", f"http://127.0.0.1:{port}"),
                *("--codec-auth", f"Bearer {TOKEN}"),
            ],
            check=False,
            capture_output=True,
            text=True,
        )

    assert answer.headers["access-control-allow-origin"] == UI
    assert MARK not in _text(_payloads(history))
    assert MARK in _text(answer.json()["payloads"])
    assert MARK in _text(_payloads(json.loads(shown.stdout))), shown.stderr


async def test_what_the_codec_server_encodes_it_decodes(keys_file: Path) -> None:
    """`temporal workflow start --input` goes through /encode and is encrypted with the newest
    key."""
    app = create_app(EncryptingCodec(Keys(keys_file)), TOKEN, [UI])
    plain = {"metadata": {"encoding": "anNvbi9wbGFpbg=="}, "data": "Im1vb24i"}
    async with serving(app, "127.0.0.1", 0) as port:
        hidden = (await _ask(port, f"/{TOKEN}/encode", {"payloads": [plain]})).json()
        back = (await _ask(port, f"/{TOKEN}/decode", hidden)).json()

    assert "Im1vb24i" not in json.dumps(hidden)
    assert back == {"payloads": [plain]}


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/decode", {}, 401),
        ("/decode", {"authorization": "Bearer wrong"}, 401),
        (f"/{'u' * 64}/decode", {"origin": UI}, 401),
        (f"/{TOKEN}/decode", {"origin": "http://evil.example"}, 403),
        (f"/{TOKEN}/decode", {"origin": "null"}, 403),
        ("/decode", {"authorization": f"Bearer {TOKEN}"}, 200),
        (f"/{TOKEN}/decode", {"origin": UI}, 200),
    ],
)
async def test_only_the_ui_and_holders_of_the_token_are_answered(
    keys_file: Path, path: str, headers: dict[str, str], status: int
) -> None:
    """Without the token, or from a page of another origin, nothing is decrypted."""
    app = create_app(EncryptingCodec(Keys(keys_file)), TOKEN, [UI])
    async with serving(app, "127.0.0.1", 0) as port:
        answer = await _ask(port, path, {"payloads": []}, **headers)

    assert answer.status_code == status
    assert answer.headers.get("access-control-allow-origin") in (None, UI)


async def test_a_browser_may_ask_from_the_ui_alone(keys_file: Path) -> None:
    """The CORS preflight request is allowed for the UI's origin only."""
    app = create_app(EncryptingCodec(Keys(keys_file)), TOKEN, [UI])
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,x-namespace,authorization",
    }
    async with serving(app, "127.0.0.1", 0) as port, httpx.AsyncClient(trust_env=False) as http:
        url = f"http://127.0.0.1:{port}/{TOKEN}/decode"
        ours = await http.options(url, headers=asked | {"origin": UI})
        theirs = await http.options(url, headers=asked | {"origin": "http://evil.example"})

    assert (ours.status_code, ours.headers["access-control-allow-origin"]) == (200, UI)
    assert "access-control-allow-origin" not in theirs.headers
