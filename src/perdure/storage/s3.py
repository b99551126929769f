"""The store in an S3 bucket, through boto3 without its own retries, because Temporal retries.

Needs a server that honours `If-None-Match` and `If-Match` on PutObject, as AWS and current S3
servers do. Credentials and region come from the AWS_* variables and files.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from perdure.errors import (
    ConfigurationError,
    MissingDependency,
    NotFound,
    PerdureError,
    PreconditionFailed,
    StoreUnavailable,
)
from perdure.storage.base import Stored, check_key

try:
    import boto3
    import botocore.exceptions as sdk
    from botocore.config import Config
except ImportError as error:
    raise MissingDependency("a store on S3 needs boto3: pip install 'perdure[s3]'") from error

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

T = TypeVar("T")

CONNECTIONS = 64
BUSY_STATUS = {409, 429, 500, 502, 503, 504}
BUSY_CODE = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException"}
PAGE = 1000
UNREACHABLE = (
    sdk.ConnectionError,
    sdk.HTTPClientError,
    sdk.IncompleteReadError,
    sdk.CredentialRetrievalError,
    sdk.MetadataRetrievalError,
)
CREDENTIALS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_DEFAULT_REGION"


class S3Store:
    """Objects under a prefix of a bucket. Etags are S3's, compared as text and never parsed."""

    def __init__(self, url: str, endpoint_url: str | None = None) -> None:
        """`url`: `s3://bucket` or `s3://bucket/prefix`. Makes no network call yet.

        Raises: ConfigurationError if the URL names no bucket or the AWS_* settings are unusable.
        """
        self.bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
        if not url.startswith("s3://") or not self.bucket:
            raise ConfigurationError(f"store {url!r}: write s3://bucket or s3://bucket/prefix")
        self.url = f"s3://{self.bucket}/{prefix}".rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="s3")
        config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=CONNECTIONS,
            connect_timeout=10,
            read_timeout=60,
            s3={"addressing_style": "path" if endpoint_url else "auto"},
        )
        try:
            self._client = boto3.client("s3", endpoint_url=endpoint_url, config=config)
        except (sdk.BotoCoreError, ValueError) as error:
            raise ConfigurationError(f"store {url!r}: {error}; check {CREDENTIALS}") from error

    async def get(self, key: str) -> Stored:
        return await self._call(f"get {key!r}", partial(self._get, self._name(key)))

    async def exists(self, key: str) -> bool:
        look = partial(self._client.head_object, Bucket=self.bucket, Key=self._name(key))
        try:
            await self._call(f"look up {key!r}", look)
        except NotFound:
            return False
        return True

    async def put(self, key: str, data: bytes, *, if_match: str | None = None) -> str:
        name = self._name(key)
        put = partial(self._client.put_object, Bucket=self.bucket, Key=name, Body=data)
        if if_match is not None:
            put = partial(put, IfMatch=if_match)
        try:
            return (await self._call(f"put {key!r}", put))["ETag"]
        except NotFound:
            raise PreconditionFailed(f"{key!r} was deleted by another writer") from None
        except StoreUnavailable:
            found = await self._read_back(key)
            if found is not None and found.data == data:
                return found.etag
            if if_match is not None and (found is None or found.etag != if_match):
                raise PreconditionFailed(f"{key!r} was changed by another writer") from None
            raise

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        name = self._name(key)
        put = partial(self._client.put_object, Bucket=self.bucket, Key=name, Body=data)
        try:
            await self._call(f"put {key!r}", partial(put, IfNoneMatch="*"))
        except PreconditionFailed:
            return False
        except StoreUnavailable:
            found = await self._read_back(key)
            if found is None:
                raise
            return found.data == data
        return True

    async def delete(self, key: str) -> None:
        delete = partial(self._client.delete_object, Bucket=self.bucket, Key=self._name(key))
        await self._call(f"delete {key!r}", delete)

    async def list(self, prefix: str) -> AsyncIterator[str]:
        after: str | None = ""
        while after is not None:
            page = await self._call(f"list {prefix!r}", partial(self._page, prefix, after))
            for entry in page.get("Contents", ()):
                yield entry["Key"].removeprefix(self._prefix)
            after = page.get("NextContinuationToken")

    # -- calls ---------------------------------------------------------------------------------

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _get(self, name: str) -> Stored:
        answer = self._client.get_object(Bucket=self.bucket, Key=name)
        return Stored(answer["Body"].read(), answer["ETag"])

    def _page(self, prefix: str, after: str) -> "ListObjectsV2OutputTypeDef":
        page = partial(self._client.list_objects_v2, Bucket=self.bucket, MaxKeys=PAGE)
        page = partial(page, Prefix=self._prefix + prefix)
        return page(ContinuationToken=after) if after else page()

    async def _read_back(self, key: str) -> Stored | None:
        """The object after a write whose answer was lost; None if absent. Raises: StoreUnavailable."""
        try:
            return await self.get(key)
        except NotFound:
            return None

    async def _call(self, doing: str, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, call)
        except sdk.ClientError as error:
            raise self._refusal(doing, error) from error
        except UNREACHABLE as error:
            raise StoreUnavailable(f"{self.url}: cannot {doing}: {error}") from error
        except sdk.BotoCoreError as error:
            raise ConfigurationError(
                f"{self.url}: cannot {doing}: {error}; check {CREDENTIALS}"
            ) from error

    def _refusal(self, doing: str, error: sdk.ClientError) -> PerdureError:
        """The error to raise for an error answer of the server."""
        code = error.response.get("Error", {}).get("Code", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        said = f"{self.url}: cannot {doing}: {error}"
        if code == "NoSuchBucket":
            return ConfigurationError(
                f"{self.url}: bucket {self.bucket!r} does not exist; make it, or set PERDURE_STORE"
            )
        if status == 404:
            return NotFound(said)
        if status == 412:
            return PreconditionFailed(said)
        if status in BUSY_STATUS or code in BUSY_CODE:
            return StoreUnavailable(said)
        return ConfigurationError(
            f"{said}; check bucket {self.bucket!r} and {CREDENTIALS}",
            boundary=StoreUnavailable.boundary,
        )
