"""The store in an S3 bucket.

It needs a server that honors `If-None-Match` and `If-Match` on PutObject, as AWS and current S3
servers do. Credentials and region come from the AWS_* variables and files.
"""

from collections.abc import AsyncIterator, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from perdure.errors import (
    ConfigurationError,
    MissingDependency,
    NotFound,
    PreconditionFailed,
    StoreUnavailable,
)
from perdure.installation import command_for_extra
from perdure.storage.base import Stored, check_key

try:
    from botocore.exceptions import ClientError

    from perdure.storage.s3_client import Limit, S3Calls, tries
    from perdure.storage.s3_errors import MalformedResponse, Place, is_empty_object
except ImportError as error:
    raise MissingDependency(f"a store on S3 needs boto3: {command_for_extra('s3')}") from error

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef, ObjectIdentifierTypeDef

PAGE = 1000


class S3Store:
    """Objects under a prefix of a bucket. Etags come from S3 and are opaque text."""

    def __init__(self, url: str, endpoint_url: str | None = None) -> None:
        """`url`: `s3://bucket` or `s3://bucket/prefix`. Makes no network call.

        Raises: ConfigurationError if the URL has no bucket or the endpoint is not a URL.
        """
        self.bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        if not url.startswith("s3://") or not self.bucket:
            raise ConfigurationError(f"store {url!r}: write s3://bucket or s3://bucket/prefix")
        self.url = f"s3://{self.bucket}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._calls = S3Calls(Place(self.url, self.bucket, endpoint_url or None))

    @property
    def worked(self) -> bool:
        return self._calls.worked

    async def get(self, key: str) -> Stored:
        limit = Limit()
        return await self._calls.repeat(f"get {key!r}", partial(self._get, key, limit, {}), limit)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        limit, wanted = Limit(), {"Range": f"bytes={start}-{start + length - 1}"}
        get = partial(self._get, key, limit, wanted)
        return (await self._calls.repeat(f"get {key!r}", get, limit)).data

    async def exists(self, key: str) -> bool:
        try:
            return await self._calls.repeat(f"look up {key!r}", partial(self._exists, key))
        except NotFound:
            return False

    async def put(self, key: str, data: bytes, *, if_match: str | None = None) -> str:
        conditions = {} if if_match is None else {"IfMatch": if_match}
        limit, in_doubt = Limit(len(data)), False
        async for is_last in tries(limit):
            try:
                return await self._put(key, data, conditions, limit)
            except (NotFound, PreconditionFailed):
                if not in_doubt:
                    raise PreconditionFailed(f"{key!r} was changed by another writer") from None
            except StoreUnavailable as error:
                in_doubt, failure = True, error
            found = await self._read_back(key)
            if found is not None and found.data == data:
                return found.etag
            if if_match is not None and (found is None or found.etag != if_match):
                raise PreconditionFailed(f"{key!r} was changed by another writer")
            if is_last:
                break
        raise failure

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        limit, in_doubt = Limit(len(data)), False
        async for is_last in tries(limit):
            try:
                await self._put(key, data, {"IfNoneMatch": "*"}, limit)
                return True
            except PreconditionFailed:
                if not in_doubt:
                    return False
            except StoreUnavailable as error:
                in_doubt, failure = True, error
            found = await self._read_back(key)
            if found is not None:
                return found.data == data
            if is_last:
                break
        raise failure

    async def delete(self, key: str) -> None:
        name = self._name(key)
        await self._calls.repeat(
            f"delete {key!r}", lambda s3: s3.delete_object(Bucket=self.bucket, Key=name)
        )

    async def delete_many(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), PAGE):
            names = [self._name(key) for key in keys[start : start + PAGE]]
            doing = f"delete {keys[start]!r} and others"
            await self._calls.repeat(doing, partial(self._delete_page, names))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[str]:
        async for key, _ in self.sizes(prefix, after=after):
            yield key

    async def sizes(self, prefix: str, *, after: str = "") -> AsyncIterator[tuple[str, int]]:
        start = {"StartAfter": self._prefix + after} if after else {}
        while True:
            page = await self._calls.repeat(f"list {prefix!r}", partial(self._page, prefix, start))
            for entry in page.get("Contents", ()):
                yield entry["Key"].removeprefix(self._prefix), entry["Size"]
            if (following := page.get("NextContinuationToken")) is None:
                return
            start = {"ContinuationToken": following}

    # -- calls ---------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    async def _put(self, key: str, data: bytes, conditions: dict[str, str], limit: Limit) -> str:
        name = self._name(key)

        def put(s3: "S3Client") -> str:
            # boto3 sends a file in blocks, and the timeout applies to each block.
            answer = s3.put_object(Bucket=self.bucket, Key=name, Body=BytesIO(data), **conditions)  # type: ignore[arg-type]  # the conditions
            return _etag(answer.get("ETag"))

        return await self._calls.once(f"put {key!r}", put, limit)

    def _get(self, key: str, limit: Limit, wanted: dict[str, str], s3: "S3Client") -> Stored:
        answer = s3.get_object(Bucket=self.bucket, Key=self._name(key), **wanted)  # type: ignore[arg-type]  # the range
        limit.allow(answer["ContentLength"])
        return Stored(answer["Body"].read(), _etag(answer.get("ETag")))

    def _exists(self, key: str, s3: "S3Client") -> bool:
        """GET the first byte. A HEAD answer has no body to tell an absent bucket from an absent
        key."""
        try:
            answer = s3.get_object(Bucket=self.bucket, Key=self._name(key), Range="bytes=0-0")
        except Exception as error:
            if is_empty_object(error):
                return True
            raise
        answer["Body"].read()
        return bool(_etag(answer.get("ETag")))

    def _delete_page(self, names: Sequence[str], s3: "S3Client") -> None:
        objects: list[ObjectIdentifierTypeDef] = [{"Key": name} for name in names]
        answer = s3.delete_objects(Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True})
        for failed in answer.get("Errors", ()):
            said = {"Code": failed.get("Code", ""), "Message": failed.get("Message", "")}
            about: Any = {"Error": said, "ResponseMetadata": {"HTTPStatusCode": 500}}
            raise ClientError(about, "DeleteObjects")

    def _page(
        self, prefix: str, start: dict[str, str], s3: "S3Client"
    ) -> "ListObjectsV2OutputTypeDef":
        ask = partial(s3.list_objects_v2, Bucket=self.bucket, MaxKeys=PAGE)
        page = ask(Prefix=self._prefix + prefix, **start)  # type: ignore[arg-type]  # where to start
        if "IsTruncated" not in page:
            raise MalformedResponse("the answer is not a list of objects")
        return page

    async def _read_back(self, key: str) -> Stored | None:
        """Read the key after a write in doubt. None if it is absent. Raises: StoreUnavailable."""
        try:
            return await self.get(key)
        except NotFound:
            return None


def _etag(etag: str | None) -> str:
    if etag is None:
        raise MalformedResponse("the answer has no ETag")
    return etag
