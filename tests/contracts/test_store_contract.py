"""Every store passes the same contract. Then come tests of what only disks or only networks do."""

import asyncio
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from perdure.errors import ConfigurationError, PreconditionFailed, StoreUnavailable
from perdure.storage.local_store import LocalStore
from perdure.storage.s3_store import S3Store
from perdure.testing.store_contract import StoreContract
from tests.s3_server import S3Server


@pytest.fixture(scope="module")
def shared_s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def s3(shared_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server on loopback with one empty bucket `results`."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "dummy")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "dummy")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3", endpoint_url=shared_s3.url)
    client.create_bucket(Bucket="results")
    yield shared_s3
    shared_s3.fault = None
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="results"):
        for entry in page.get("Contents", ()):
            client.delete_object(Bucket="results", Key=entry["Key"])
    client.close()


class TestLocalStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "store")


class TestS3Store(StoreContract):
    page = 20

    @pytest.fixture
    def store(self, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Store:
        monkeypatch.setattr("perdure.storage.s3_store.PAGE", self.page)
        return S3Store("s3://results/some/prefix", endpoint_url=s3.url)


# --- the local folder ---------------------------------------------------------------------------


async def test_local_object_is_a_plain_file(tmp_path: Path) -> None:
    """A person finds each object as a file at its key, and no half-written files."""
    store = LocalStore(tmp_path)
    await store.put("runs/r/run.json", b"{}")

    assert (tmp_path / "runs/r/run.json").read_bytes() == b"{}"
    assert list((tmp_path / ".perdure/tmp").iterdir()) == []


async def test_local_write_under_an_object_says_why(tmp_path: Path) -> None:
    """A key below an existing object is refused with the reason, not with a file system error."""
    store = LocalStore(tmp_path)
    await store.put("a", b"x")

    with pytest.raises(ConfigurationError, match="cannot extend another object"):
        await store.put("a/b", b"x")


async def test_local_stores_on_one_folder_share_the_race(tmp_path: Path) -> None:
    """Writers in separate stores on one folder, as in separate workers, still have one winner."""
    etag = await LocalStore(tmp_path).put("race", b"start")
    writes = [LocalStore(tmp_path).put("race", b"%d" % i, if_match=etag) for i in range(16)]
    results = await asyncio.gather(*writes, return_exceptions=True)

    assert sum(isinstance(result, str) for result in results) == 1


FILL = """
import asyncio, sys
from perdure.errors import StoreUnavailable
from perdure.storage.local_store import LocalStore

async def main():
    store = LocalStore(sys.argv[1])
    await store.put("small", b"kept")
    for write in (store.put, store.put_if_absent):
        try:
            await write("large", bytes(1 << 22))
        except StoreUnavailable as error:
            print(error)
    print([key async for key in store.list("")], (await store.get("small")).data)
    await store.put("small", b"again")

asyncio.run(main())
"""


MAKE_FILES = """
import asyncio, sys
from pathlib import Path
from perdure.errors import StoreUnavailable
from perdure.storage.local_store import LocalStore

async def main():
    store = LocalStore(Path(sys.argv[1]))
    try:
        for number in range(100):
            await store.put(f"folder-{number}/one", b"x")
    except StoreUnavailable as error:
        print(error)

asyncio.run(main())
"""


def test_a_disk_without_inodes_is_named(tmp_path: Path) -> None:
    """The disk still has space, so the message says what to remove."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare to mount a small disk")
    inside = 'mount -t tmpfs -o nr_inodes=40 none "$1" && exec "$2" -c "$3" "$1"'
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside, "sh"]
    argv = [*mounted, str(tmp_path), sys.executable, MAKE_FILES]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")

    assert "it has no free inode, so remove files there" in done.stdout


def test_full_disk_leaves_no_torn_object(tmp_path: Path) -> None:
    """On a full disk a write fails with that reason and leaves no file; smaller writes succeed."""
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare to mount a small disk")
    inside = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", inside, "sh"]
    argv = [*mounted, str(tmp_path), sys.executable, FILL]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")

    assert done.stdout.count("No space left on device; free space there") == 2
    assert done.stdout.splitlines()[-1] == "['small'] b'kept'"
    assert done.returncode == 0


# --- the bucket ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["500", "503", "429", "unsent"])
async def test_s3_trouble_that_lasts_is_told(s3: S3Server, fault: str) -> None:
    """A busy or unreachable server is StoreUnavailable after four calls. Then Temporal retries."""
    store = S3Store("s3://results", endpoint_url=s3.url)
    s3.fault, before = fault, s3.requests
    with pytest.raises(StoreUnavailable):
        await store.put_if_absent("a", b"x")
    asked = s3.requests - before
    s3.fault = None

    assert asked == 4 * 2  # the write, and the read that checks whether it got through
    assert await store.put_if_absent("a", b"x")


async def test_s3_write_whose_answer_was_lost_counts(s3: S3Server) -> None:
    """A write that got through although its answer was lost is recognized by its content."""
    store = S3Store("s3://results", endpoint_url=s3.url)
    s3.fault = "lost answer"
    created = await store.put_if_absent("a", b"1")
    etag = await store.put("a", b"2", if_match=(await store.get("a")).etag)

    assert created
    assert await store.get("a") == (b"2", etag)


async def test_s3_lost_answer_does_not_hide_a_lost_race(s3: S3Server) -> None:
    """A refused write whose answer was lost too is reported as refused."""
    store = S3Store("s3://results", endpoint_url=s3.url)
    await store.put("a", b"winner")
    s3.fault = "lost answer"

    assert not await store.put_if_absent("a", b"loser")
    with pytest.raises(PreconditionFailed):
        await store.put("a", b"loser", if_match='"0123"')


async def test_s3_absent_bucket_is_named(s3: S3Server) -> None:
    """Every call says that the bucket is absent, and no call says that a key is absent."""
    store = S3Store("s3://no-such-bucket/prefix", endpoint_url=s3.url)

    with pytest.raises(StoreUnavailable, match="create the bucket 'no-such-bucket'"):
        await store.put("a", b"x")
    with pytest.raises(StoreUnavailable, match="no-such-bucket"):
        await store.exists("a")


async def test_s3_server_that_is_down_is_unavailable(s3: S3Server) -> None:
    """A server that is down is StoreUnavailable: it may come back."""
    with socket.socket() as silent:  # bound, so that the kernel gives the port to no other process
        silent.bind(("127.0.0.1", 0))
        store = S3Store("s3://results", endpoint_url=f"http://127.0.0.1:{silent.getsockname()[1]}")

        with pytest.raises(StoreUnavailable):
            await store.exists("a")


def test_s3_url_needs_a_bucket() -> None:
    """A URL without a bucket is refused with the right form."""
    with pytest.raises(ConfigurationError, match="s3://bucket"):
        S3Store("s3:///prefix")
