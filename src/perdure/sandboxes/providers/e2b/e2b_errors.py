"""Turns the E2B SDK's errors into ours, by what to do next. The SDK's own retries are off."""

import re

from perdure.errors import ConfigurationError, ControlPlaneError, PerdureError, RateLimited
from perdure.sandboxes.guest.account_exhaustion import exhausted
from perdure.sandboxes.guest.guest_sandbox import DiskTooSmall
from perdure.sandboxes.guest.service_retries import Conflict, Missing

REFUSAL_PASSES_S = 6.5
"""Seconds to wait after a refusal of a key that worked before: proxies cache it for 5 s."""
RELEASE_S = 10.0
"""Seconds to wait before another boot while the account has as many sandboxes as it may."""


def typed(error: Exception, what: str, *, key_works: bool) -> PerdureError:
    """The failure as one of our errors. `key_works`: the API key was accepted before."""
    import httpx
    from e2b import exceptions as e2b

    if isinstance(error, PerdureError):
        return error
    said = f"E2B: {what}: {type(error).__name__}: {error}"[:500]
    match error:
        case e2b.AuthenticationException():
            if key_works:
                return ControlPlaneError(said, retry_after=REFUSAL_PASSES_S)
            return ConfigurationError(f"{said}; start the workers with a valid E2B_API_KEY")
        case e2b.RateLimitException():
            if "concurrent" in str(error):
                return RateLimited(said, limit="concurrency", retry_after=RELEASE_S)
            return RateLimited(said, retry_after=1.0)  # the SDK hides Retry-After
        case e2b.SandboxNotRunningException() | e2b.NotFoundException():
            return Missing(said)
        case e2b.NotEnoughSpaceException():
            return DiskTooSmall(f"{said}; the template's disk is full: give it a larger one")
        case e2b.InvalidArgumentException():
            return ConfigurationError(said)
        case e2b.ServiceBusyException() | e2b.TimeoutException() | httpx.HTTPError():
            return ControlPlaneError(said)
    return _by_status(error, said)


def _by_status(error: Exception, said: str) -> PerdureError:
    """For errors without a class in the SDK: their text begins with the status."""
    found = re.match(r"(\d{3}):", str(error))
    status = getattr(error, "status_code", None) or (int(found[1]) if found else None)
    if status in (402, 403) and (spent := exhausted(said, status=status)) is not None:
        return spent
    if status == 403 or "permission_denied" in str(error).lower():
        return ConfigurationError(f"{said}; the account of E2B_API_KEY may not do this")
    if status == 404:
        return Missing(said)
    if status == 409:
        return Conflict(said)
    if status == 413:
        return ConfigurationError(f"{said}; it is larger than the service accepts")
    return ControlPlaneError(said)
