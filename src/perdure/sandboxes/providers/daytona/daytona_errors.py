"""Turns the Daytona SDK's errors into ours, by what to do next."""

import re
from typing import Any

from perdure.errors import ConfigurationError, ControlPlaneError, PerdureError, RateLimited
from perdure.sandboxes.guest.account_exhaustion import exhausted
from perdure.sandboxes.guest.guest_sandbox import DiskTooSmall
from perdure.sandboxes.guest.service_retries import Conflict, Missing, retry_after

REFUSAL_PASSES_S = 6.5
"""Seconds to wait after a refusal of a key that worked before: the proxy caches it for 5 s."""
RELEASE_S = 10.0
"""Seconds to wait before another boot while the account's quota is used up."""
QUOTA = re.compile(r"Total \w+ limit exceeded|quota", re.IGNORECASE)
NOT_NOW = re.compile(r"valid state|is not running|in progress|failed to convert exit code")


def typed(error: Exception, what: str, *, key_works: bool) -> PerdureError:
    """The failure as one of our errors. `key_works`: the API key was accepted before.

    Raises: `error` itself, if it does not come from the service.
    """
    import daytona

    if isinstance(error, PerdureError):
        return error
    if not isinstance(error, daytona.DaytonaError | OSError):  # TimeoutError is an OSError
        raise error
    said = f"Daytona: {what}: {type(error).__name__}: {error}"[:500]
    status = getattr(error, "status_code", None)
    match error:
        case daytona.DaytonaAuthenticationError():
            if key_works:
                return ControlPlaneError(said, retry_after=REFUSAL_PASSES_S)
            return ConfigurationError(f"{said}; start the workers with a valid DAYTONA_API_KEY")
        case daytona.DaytonaForbiddenError():
            return exhausted(said) or ConfigurationError(
                f"{said}; the account of DAYTONA_API_KEY may not do this"
            )
        case daytona.DaytonaRateLimitError():
            if QUOTA.search(str(error)):
                return RateLimited(said, limit="concurrency", retry_after=RELEASE_S)
            wait = retry_after(error.headers)
            return exhausted(said, retry_after=wait) or RateLimited(said, retry_after=wait or 1.0)
        case daytona.DaytonaNotFoundError():
            return Missing(said)
        case daytona.DaytonaConflictError():
            return Conflict(said)
        case daytona.DaytonaTimeoutError() | daytona.DaytonaConnectionError():
            return ControlPlaneError(said)
        case daytona.DaytonaBadRequestError() | daytona.DaytonaUnprocessableEntityError():
            return _refused(said)
    if status == 402 and (spent := exhausted(said, status=status)) is not None:
        return spent
    if status == 413:
        return ConfigurationError(f"{said}; it is larger than the service accepts")
    if status == 507:
        return DiskTooSmall(f"{said}; the sandbox's disk is full: give it a larger one")
    if status is not None and (other := _by_status(status)):
        return typed(other(str(error), status), what, key_works=key_works)
    return ControlPlaneError(said)


def _refused(said: str) -> PerdureError:
    """For 400 and 422, whose text says whether the request is wrong or only too early."""
    if QUOTA.search(said):
        return RateLimited(said, limit="concurrency", retry_after=RELEASE_S)
    if NOT_NOW.search(said):
        return ControlPlaneError(said)
    return ConfigurationError(said)


def _by_status(status: int) -> Any:
    """The SDK's class for a status: failed uploads raise its base class."""
    import daytona

    return {
        400: daytona.DaytonaBadRequestError,
        401: daytona.DaytonaAuthenticationError,
        403: daytona.DaytonaForbiddenError,
        404: daytona.DaytonaNotFoundError,
        409: daytona.DaytonaConflictError,
        429: daytona.DaytonaRateLimitError,
    }.get(status)
