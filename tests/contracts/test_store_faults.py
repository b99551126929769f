"""A real S3 API behind a proxy that injects faults between Perdure and its store."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from perdure.errors import ConfigurationError, NotFound, StoreUnavailable
from perdure.settings.settings_tree import Settings
from perdure.storage import s3_client
from perdure.storage.local_store import LocalStore
from perdure.storage.s3_store import S3Store
from perdure.storage.store_preflight import check_store
from tests.s3_proxy import Fault, S3Proxy, cut, lose_answer, refuse, reset, stall, trickle
from tests.s3_server import S3Server

PASSING = {
    "access denied": refuse(403, "AccessDenied"),
    "key unknown": refuse(403, "InvalidAccessKeyId"),
    "signature": refuse(403, "SignatureDoesNotMatch"),
    "bare 403": refuse(403),
    "token expired": refuse(400, "ExpiredToken"),
    "clock": refuse(403, "RequestTimeTooSkewed"),
    "clock, 400": refuse(400, "RequestTimeTooSkewed"),
    "bare 400": refuse(400),
    "401": refuse(401),
    "bucket": refuse(404, "NoSuchBucket"),
    "bare 404": refuse(404),
    "408": refuse(408),
    "409": refuse(409, "OperationAborted"),
    "429": refuse(429),
    "500": refuse(500, "InternalError"),
    "503": refuse(503, "SlowDown"),
    "507": refuse(507),
    **{f"{status}": refuse(status) for status in (520, 524, 530)},
    "reset": reset,
}


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[S3Server, S3Proxy]]:
    server = S3Server()
    proxy = S3Proxy(server.url)
    yield server, proxy
    proxy.close()
    server.close()


@pytest.fixture
def proxy(servers: tuple[S3Server, S3Proxy], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    """A proxy in front of an S3 server with one bucket `results`."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "dummy")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3", endpoint_url=servers[0].url)
    client.create_bucket(Bucket="results")
    client.close()
    yield servers[1]
    servers[1].heal()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report a lasting fault at the first call."""
    monkeypatch.setattr(s3_client, "PAUSES_S", ())


def opened(proxy: S3Proxy, prefix: str = "prefix") -> S3Store:
    return S3Store(f"s3://results/{prefix}", endpoint_url=proxy.url)


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
async def test_whatever_can_pass_is_retried_by_the_caller(proxy: S3Proxy, fault: Fault) -> None:
    """Every call of the store says `StoreUnavailable`, and none says that an object is absent."""
    store = opened(proxy)
    await store.put("kept", b"x")
    proxy.play(fault)

    calls = [
        *(store.get("kept"), store.exists("kept"), store.delete("kept"), _listed(store)),
        *(store.put("kept", b"y"), store.put_if_absent("new", b"y")),
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)

    assert [type(result) for result in results] == [StoreUnavailable] * len(calls)
    proxy.heal()
    assert (await store.get("kept")).data == b"x"
    assert not await store.exists("new")


async def test_a_page_in_place_of_an_object_is_no_object(proxy: S3Proxy) -> None:
    """A captive portal answers every call with 200 and HTML: it is neither data nor a list."""
    store = opened(proxy)
    proxy.play(refuse(200))

    for call in (store.get("a"), store.exists("a"), store.put("a", b"y"), _listed(store)):
        with pytest.raises(StoreUnavailable):
            await call


@pytest.mark.parametrize("fault", [stall, cut, trickle], ids=["stalled", "cut", "trickled"])
async def test_a_body_that_does_not_come_is_given_up(
    proxy: S3Proxy, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call hangs if a server is silent, stops in the middle, or sends a byte now and then."""
    monkeypatch.setattr(s3_client, "CALL_S", 0.3)
    store = opened(proxy)
    await store.put("kept", bytes(4096))
    proxy.play(fault)

    with pytest.raises(StoreUnavailable):
        await store.get("kept")
    proxy.heal()

    monkeypatch.setattr(s3_client, "CALL_S", 40.0)
    assert len((await store.get("kept")).data) == 4096


async def test_an_error_answer_that_breaks_off_says_nothing_of_the_object(proxy: S3Proxy) -> None:
    """A connection reset in the middle of "no such key" is neither an absent object nor a crash."""
    store = opened(proxy)
    proxy.play(cut)

    for call in (store.get("absent"), store.get_range("absent", 0, 9), store.exists("absent")):
        with pytest.raises(StoreUnavailable):
            await call


async def test_stuck_calls_do_not_keep_later_ones_waiting(
    proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More calls are stuck than the store has threads, and the next call is still answered."""
    monkeypatch.setattr(s3_client, "CALL_S", 0.3)
    monkeypatch.setattr(s3_client, "CONNECTIONS", 2)
    store = opened(proxy)
    await store.put("kept", bytes(4096))
    proxy.play(trickle)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await store.get("kept")
    monkeypatch.setattr(s3_client, "CALL_S", 40.0)
    proxy.play(trickle, share=0.0)  # the stuck ones are not released by this

    assert await store.exists("kept")


async def test_a_lost_answer_changes_nothing(proxy: S3Proxy) -> None:
    """A read whose answer is lost is StoreUnavailable; the object is as it was."""
    store = opened(proxy)
    await store.put("kept", b"x")
    proxy.play(lose_answer)

    with pytest.raises(StoreUnavailable):
        await store.get("kept")
    proxy.heal()

    assert (await store.get("kept")).data == b"x"


async def test_a_fault_now_and_then_costs_no_caller_a_try(
    proxy: S3Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth of the calls fail, some after taking effect. Forty writers agree on the winner."""
    monkeypatch.setattr(s3_client, "PAUSES_S", (0.0,) * 8)
    proxy.play(reset, lose_answer, cut, refuse(503), refuse(403, "AccessDenied"), share=0.2)
    store = opened(proxy, "flaky")
    first = await asyncio.gather(*(store.put_if_absent(f"{n}", b"%d" % n) for n in range(20)))
    second = await asyncio.gather(*(store.put_if_absent(f"{n}", b"other") for n in range(20)))

    assert (set(first), set(second)) == ({True}, {False})
    assert [(await store.get(f"{n}")).data for n in range(20)] == [b"%d" % n for n in range(20)]


async def test_an_absent_object_is_still_absent(proxy: S3Proxy) -> None:
    """Only the server's own answer about the key says so; empty objects exist."""
    store = opened(proxy)
    await store.put("empty", b"")

    with pytest.raises(NotFound):
        await store.get("absent")
    assert not await store.exists("absent")
    assert await store.exists("empty")


async def _listed(store: S3Store) -> list[str]:
    return [key async for key in store.list("")]


# --- credentials ----------------------------------------------------------------------------------


@pytest.fixture
def guarded(proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The shared credentials file; the server knows only the key that `proxy.keys` names."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setattr(s3_client, "LOOK_EVERY_S", 0.0)
    _rotate(path, proxy, "first")
    return path


def _rotate(path: Path, proxy: S3Proxy, key: str) -> None:
    _write(path, key)
    proxy.only_key = key


def _write(path: Path, key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = secret\n")


async def test_rotated_credentials_are_read_again(proxy: S3Proxy, guarded: Path) -> None:
    """The shared file gets another key, the old key is revoked, and no call fails."""
    store = opened(proxy)
    await store.put("kept", b"x")
    _rotate(guarded, proxy, "second")

    assert (await store.get("kept")).data == b"x"


async def test_credentials_that_come_later_are_found(proxy: S3Proxy, guarded: Path) -> None:
    """The key is revoked first. The file is then absent and half written, before it is complete."""
    store = opened(proxy)
    await store.put("kept", b"x")
    proxy.only_key = "second"
    for content in (None, "[default]\naws_access_key_id = sec", "[default]\naws_acc"):
        guarded.unlink(missing_ok=True)
        if content is not None:
            guarded.write_text(content)
        with pytest.raises(StoreUnavailable):
            await store.get("kept")
    _write(guarded, "second")

    assert (await store.get("kept")).data == b"x"


async def test_a_store_opened_without_credentials_finds_them(proxy: S3Proxy, guarded: Path) -> None:
    """A worker that starts while the file is being replaced needs no restart."""
    guarded.write_text("[default")
    store = opened(proxy)
    with pytest.raises(StoreUnavailable):
        await store.exists("kept")
    _write(guarded, "first")

    assert not await store.exists("absent")


# --- the preflight --------------------------------------------------------------------------------


def settings(home: Path, proxy: S3Proxy, bucket: str = "results") -> Settings:
    return Settings(home=home, store=f"s3://{bucket}/preflight", s3_endpoint_url=proxy.url)


WRONG = {
    "bucket": (refuse(404, "NoSuchBucket"), r"bucket 'results', or correct PERDURE_STORE$"),
    "keys": (refuse(403, "InvalidAccessKeyId"), r"correct AWS_ACCESS_KEY_ID"),
    "secret": (refuse(403, "SignatureDoesNotMatch"), r"correct AWS_ACCESS_KEY_ID"),
    "rights": (refuse(403, "AccessDenied"), r"let these keys read, write, list and delete"),
    "clock": (refuse(403, "RequestTimeTooSkewed"), r"set this host's clock$"),
    "region": (refuse(400, "IllegalLocationConstraintException"), r"correct AWS_DEFAULT_REGION"),
    "no S3": (refuse(404), r"correct PERDURE_S3_ENDPOINT_URL: http://127"),
    "silent": (stall, r"no answer within .* s: correct PERDURE_S3_ENDPOINT_URL"),
}


@pytest.mark.parametrize(("fault", "fix"), WRONG.values(), ids=WRONG.keys())
async def test_a_store_that_never_worked_is_refused_with_its_fix(
    proxy: S3Proxy, tmp_path: Path, fault: Fault, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is one sentence that names the setting."""
    monkeypatch.setattr("perdure.storage.store_preflight.LIMIT_S", 0.3 if fault is stall else 60.0)
    proxy.play(fault)

    with pytest.raises(ConfigurationError, match=fix) as refused:
        await check_store(settings(tmp_path, proxy))

    assert "\n" not in str(refused.value)


async def test_an_absent_bucket_and_a_closed_port_are_refused(
    proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same from the real server and from a port where no server listens."""
    monkeypatch.setattr("perdure.storage.store_preflight.LIMIT_S", 60.0)
    wrong = settings(tmp_path, proxy, bucket="no-such-bucket")

    with pytest.raises(ConfigurationError, match="create the bucket 'no-such-bucket'"):
        await check_store(wrong)
    closed = settings(tmp_path, proxy).model_copy(update={"s3_endpoint_url": "http://127.0.0.1:1"})
    with pytest.raises(ConfigurationError, match="correct PERDURE_S3_ENDPOINT_URL"):
        await check_store(closed)


async def test_a_store_that_worked_is_waited_for(proxy: S3Proxy, tmp_path: Path) -> None:
    """A process that starts during the outage knows from its home that the store worked."""
    here = settings(tmp_path, proxy)
    await check_store(here)
    proxy.play(refuse(403, "InvalidAccessKeyId"))

    with pytest.raises(StoreUnavailable):
        await check_store(here)
    proxy.heal()

    await check_store(here)


async def test_a_process_knows_that_its_store_worked(proxy: S3Proxy, tmp_path: Path) -> None:
    """The process's own earlier calls count, even in a new home."""
    store = opened(proxy)
    await store.exists("any")
    proxy.play(reset)

    with pytest.raises(StoreUnavailable):
        await check_store(settings(tmp_path, proxy), lambda: store)


async def test_a_busy_store_is_not_called_wrong(proxy: S3Proxy, tmp_path: Path) -> None:
    """5xx and 429 come from a server that exists, so the caller retries."""
    for fault in (refuse(503, "SlowDown"), refuse(500), refuse(429)):
        proxy.play(fault)
        with pytest.raises(StoreUnavailable):
            await check_store(settings(tmp_path, proxy))


async def test_the_preflight_leaves_nothing(proxy: S3Proxy, tmp_path: Path) -> None:
    """The object that was written is deleted."""
    await check_store(settings(tmp_path, proxy))

    assert await _listed(opened(proxy, "preflight")) == []


# --- the folder -----------------------------------------------------------------------------------


async def test_a_folder_that_is_gone_is_not_empty(tmp_path: Path) -> None:
    """While its disk is unmounted, no key counts as absent. All keys return with the disk."""
    store = LocalStore(tmp_path / "store")
    await store.put("kept", b"x")
    (tmp_path / "store").rename(tmp_path / "away")

    for call in (store.get("kept"), store.exists("kept"), store.put("new", b"x")):
        with pytest.raises(StoreUnavailable):
            await call
    with pytest.raises(StoreUnavailable):
        [key async for key in store.list("")]
    (tmp_path / "away").rename(tmp_path / "store")

    assert (await store.get("kept")).data == b"x"


async def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """A file is in place of the folder, and the error names the setting."""
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(ConfigurationError, match="a file is in the way"):
        await check_store(Settings(home=tmp_path, store=str(tmp_path / "file")))


async def test_many_calls_look_for_credentials_once(
    proxy: S3Proxy, guarded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty refused calls read the file once, and all succeed with the new key."""
    store = opened(proxy)
    await store.put("kept", b"x")
    _rotate(guarded, proxy, "second")
    monkeypatch.setattr(s3_client, "LOOK_EVERY_S", 60.0)
    found = await asyncio.gather(*(store.get("kept") for _ in range(50)))

    assert {one.data for one in found} == {b"x"}
