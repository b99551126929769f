"""Maps error answers of an S3 server to Perdure's errors, with the fix if the store has never
worked.

Two answers concern the object: it is absent, or it has another version. A few mean that the request
can never succeed. All others become StoreUnavailable, because their cause may pass: credentials
rotate, clocks are set, buckets and proxies come back.
"""

from dataclasses import dataclass

import botocore.exceptions as sdk
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from perdure.errors import (
    ConfigurationError,
    NotFound,
    PerdureError,
    PreconditionFailed,
    StoreUnavailable,
)

SDK_ERRORS = (sdk.ClientError, sdk.BotoCoreError, ResponseParserError, HTTPError, OSError)
"""All errors that a call of the client may raise. botocore does not wrap urllib3's errors if the
error answer to a GET is cut off."""
NEVER = {"EntityTooLarge", "InvalidBucketName", "KeyTooLongError", "NotImplemented"}
NEVER_STATUS = {413, 501}
CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}
REGION = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}
DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem"}
KEYS_REFUSED = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}
"""Codes of answers with status 400. Any 401 or 403 may concern the credentials too."""
NO_KEYS = (
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.CredentialRetrievalError,
    sdk.MetadataRetrievalError,
    sdk.ProfileNotFound,
    sdk.ConfigParseError,
    sdk.TokenRetrievalError,
    sdk.SSOError,
)
BUSY_STATUS = {408, 409, 425, 429}
BUSY_CODE = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException"}
KEYS = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN or AWS_PROFILE"


class MalformedResponse(OSError):
    """An answer that an S3 server would not send."""


def refuses_keys(error: Exception) -> bool:
    """Whether the server might accept other credentials."""
    if not isinstance(error, sdk.ClientError):
        return isinstance(error, NO_KEYS)
    code, status = _code_and_status(error)
    return status in (401, 403) or code in KEYS_REFUSED


@dataclass(frozen=True)
class Place:
    """The store's location, for messages."""

    url: str
    bucket: str
    endpoint: str | None

    def failure(self, doing: str, error: Exception) -> PerdureError:
        """The error to raise for an error of the client."""
        if not isinstance(error, sdk.ClientError):
            return self._no_answer(f"{self.url}: cannot {doing}: {error}", error)
        code, status = _code_and_status(error)
        message = error.response.get("Error", {}).get("Message", "")
        said = f"{self.url}: cannot {doing}: {status} {code}: {message}"
        if code == "NoSuchKey":
            return NotFound(said)
        if status == 412:
            return PreconditionFailed(said)
        if code in NEVER or status in NEVER_STATUS:
            return ConfigurationError(said, boundary=StoreUnavailable.boundary)
        return StoreUnavailable(said, fix=self._fix(code, status))

    def _no_answer(self, said: str, error: Exception) -> PerdureError:
        if isinstance(error, sdk.ParamValidationError):
            return ConfigurationError(f"{said}; correct PERDURE_STORE")
        if isinstance(error, NO_KEYS):
            return StoreUnavailable(said, fix=f"set {KEYS}")
        if isinstance(error, (MalformedResponse, ResponseParserError)):
            return StoreUnavailable(said, fix=self._no_s3_api())
        return StoreUnavailable(said, fix=self.unreachable())

    def _fix(self, code: str, status: int) -> str:
        if code == "NoSuchBucket":
            return f"create the bucket {self.bucket!r}, or correct PERDURE_STORE"
        if code in CLOCK:
            return "set this host's clock"
        if code in REGION:
            return f"correct AWS_DEFAULT_REGION to the region of the bucket {self.bucket!r}"
        if code in DENIED:
            return (
                f"let these keys read, write, list and delete in the bucket {self.bucket!r},"
                f" or correct PERDURE_STORE or {KEYS}"
            )
        if status in (401, 403) or code in KEYS_REFUSED:
            return f"correct {KEYS}"
        if status >= 500 or status in BUSY_STATUS or code in BUSY_CODE:
            return ""
        return self._no_s3_api()

    def unreachable(self) -> str:
        if self.endpoint is None:
            return "check the network, AWS_DEFAULT_REGION and PERDURE_S3_ENDPOINT_URL"
        return f"start the S3 server at {self.endpoint}, or correct PERDURE_S3_ENDPOINT_URL"

    def _no_s3_api(self) -> str:
        return f"correct PERDURE_S3_ENDPOINT_URL: {self.endpoint or 'AWS'} must be an S3 API"


def _code_and_status(error: sdk.ClientError) -> tuple[str, int]:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return error.response.get("Error", {}).get("Code", ""), int(status)


def is_empty_object(error: Exception) -> bool:
    """Whether this answers a range request for an empty object."""
    return isinstance(error, sdk.ClientError) and _code_and_status(error)[1] == 416
