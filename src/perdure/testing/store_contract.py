"""The contract of every store, as tests: subclass `StoreContract` and give a `store` fixture.

Example:
    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> MyStore: ...
"""

import asyncio
import hashlib

import pytest

from perdure.errors import ConfigurationError, NotFound, PreconditionFailed
from perdure.storage.base import Store, put_blob

WRITERS = 16


class StoreContract:
    """Run it with pytest and `asyncio_mode = "auto"`. `store` is an empty store."""

    page = 1000
    """The number of keys in one page of a listing."""

    async def test_reads_back_what_was_written(self, store: Store) -> None:
        """An object comes back byte for byte, with the etag that its write returned."""
        etag = await store.put("runs/r/run.json", b"{}\r\n")

        assert await store.get("runs/r/run.json") == (b"{}\r\n", etag)

    @pytest.mark.parametrize("data", [b"", bytes(range(256)) * 2000], ids=["empty", "binary"])
    async def test_keeps_any_bytes(self, store: Store, data: bytes) -> None:
        """Empty, large and binary objects are stored unchanged."""
        await store.put_if_absent("a/object", data)

        assert (await store.get("a/object")).data == data

    async def test_absent_key_is_not_found(self, store: Store) -> None:
        """Reading an absent key raises NotFound, also above and below existing keys."""
        await store.put("a/b", b"x")

        for absent in ("a", "a/b/c", "a/c", "z"):
            assert not await store.exists(absent)
            with pytest.raises(NotFound):
                await store.get(absent)

    async def test_reads_a_part_of_an_object(self, store: Store) -> None:
        """A reader gets the requested bytes, and NotFound for an absent key."""
        await store.put("a", b"0123456789")

        assert await store.get_range("a", 3, 4) == b"3456"
        assert await store.get_range("a", 8, 4) == b"89"
        with pytest.raises(NotFound):
            await store.get_range("b", 0, 1)

    async def test_put_overwrites(self, store: Store) -> None:
        """An unconditional put replaces the object and its etag."""
        first = await store.put("a", b"1")
        second = await store.put("a", b"2")

        assert await store.get("a") == (b"2", second)
        assert first != second

    async def test_first_writer_keeps_the_key(self, store: Store) -> None:
        """put_if_absent returns True once; after that it returns False and changes nothing."""
        assert await store.put_if_absent("a", b"first")
        assert not await store.put_if_absent("a", b"second")

        assert (await store.get("a")).data == b"first"

    async def test_repeating_the_same_write_is_harmless(self, store: Store) -> None:
        """put_if_absent with the same content leaves the object and its etag unchanged."""
        await store.put_if_absent("a", b"same")
        before = await store.get("a")
        await store.put_if_absent("a", b"same")

        assert await store.get("a") == before

    async def test_one_of_many_creators_wins(self, store: Store) -> None:
        """Exactly one of many simultaneous put_if_absent returns True, and its bytes are stored."""
        contents = [b"writer %d" % i for i in range(WRITERS)]
        wins = await asyncio.gather(*(store.put_if_absent("race", data) for data in contents))

        assert wins.count(True) == 1
        assert (await store.get("race")).data == contents[wins.index(True)]

    async def test_one_of_many_conditional_writers_wins(self, store: Store) -> None:
        """Exactly one of many simultaneous writers that name the same version succeeds."""
        etag = await store.put("race", b"start")
        writes = [store.put("race", b"writer %d" % i, if_match=etag) for i in range(WRITERS)]
        results = await asyncio.gather(*writes, return_exceptions=True)

        winners = [i for i, result in enumerate(results) if isinstance(result, str)]
        losers = [result for result in results if isinstance(result, PreconditionFailed)]
        assert (len(winners), len(losers)) == (1, WRITERS - 1)
        assert (await store.get("race")).data == b"writer %d" % winners[0]

    async def test_zombie_writer_loses(self, store: Store) -> None:
        """A writer with an old etag is refused, and the newer object stays."""
        old = await store.put("a", b"1")
        await store.put("a", b"2", if_match=old)

        with pytest.raises(PreconditionFailed):
            await store.put("a", b"zombie", if_match=old)
        assert (await store.get("a")).data == b"2"

    async def test_conditional_write_needs_the_object(self, store: Store) -> None:
        """A conditional write to a deleted key is refused and creates nothing."""
        etag = await store.put("a", b"1")
        await store.delete("a")

        with pytest.raises(PreconditionFailed):
            await store.put("a", b"2", if_match=etag)
        assert not await store.exists("a")

    async def test_lists_keys_in_lexical_order(self, store: Store) -> None:
        """A listing has exactly the keys with the prefix, sorted as text, not as folders."""
        keys = ["a-b/x", "a.json", "a/b/c", "a/b.json", "a/b2/c", "ab", "b/a"]
        for key in reversed(keys):
            await store.put(key, b"")

        assert [key async for key in store.list("")] == sorted(keys)
        assert [key async for key in store.list("a/")] == ["a/b.json", "a/b/c", "a/b2/c"]
        assert [key async for key in store.list("a/b")] == ["a/b.json", "a/b/c", "a/b2/c"]
        assert [key async for key in store.list("a/b2/c")] == ["a/b2/c"]
        assert [key async for key in store.list("nothing/")] == []
        assert [key async for key in store.list("a/", after="a/b.json")] == ["a/b/c", "a/b2/c"]
        assert [key async for key in store.list("a/", after="a/z")] == []

    async def test_lists_sizes(self, store: Store) -> None:
        """Each key with the prefix has its number of bytes."""
        for key, data in (("a/b", b"123"), ("a/c/d", b""), ("b", b"1")):
            await store.put(key, data)

        assert [one async for one in store.sizes("a/")] == [("a/b", 3), ("a/c/d", 0)]

    async def test_lists_more_than_a_page(self, store: Store) -> None:
        """A listing longer than one page is complete."""
        keys = [f"many/{i:04}" for i in range(self.page + 1)]
        for start in range(0, len(keys), 50):
            await asyncio.gather(*(store.put(key, b"") for key in keys[start : start + 50]))

        assert [key async for key in store.list("many/")] == keys

    async def test_delete_is_idempotent(self, store: Store) -> None:
        """A deleted object is gone. Deleting it again, or an absent key, succeeds."""
        await store.put("a/b", b"x")
        await store.delete("a/b")
        await store.delete("a/b")
        await store.delete("never/was")

        assert not await store.exists("a/b")

    async def test_deletes_many(self, store: Store) -> None:
        """One call deletes any number of objects. Absent keys are no error; other objects stay."""
        keys = [f"many/{i:04}" for i in range(self.page + 1)]
        for start in range(0, len(keys), 50):
            await asyncio.gather(*(store.put(key, b"") for key in keys[start : start + 50]))
        await store.put("other/many", b"")
        await store.delete_many([])
        for _ in range(2):
            await store.delete_many([*keys, "never/was"])

        assert [key async for key in store.list("")] == ["other/many"]
        assert await store.put_if_absent(keys[0], b"again")

    @pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "./a", "a" * 256])
    async def test_unusable_keys_are_refused(self, store: Store, key: str) -> None:
        """A key is refused if it could leave the store or if some store cannot hold it."""
        with pytest.raises(ConfigurationError, match="key"):
            await store.put(key, b"x")

    async def test_blob_is_named_by_its_digest(self, store: Store) -> None:
        """Storing the same bytes twice gives one object, under their sha256."""
        keys = {await put_blob(store, b"tree"), await put_blob(store, b"tree")}

        assert {key.rsplit("/", 1)[1] for key in keys} == {hashlib.sha256(b"tree").hexdigest()}
        assert [key async for key in store.list("blobs/")] == list(keys)
