"""Turns the Modal SDK's errors into ours, by what to do next."""

import re

from perdure.errors import ConfigurationError, ControlPlaneError, PerdureError, RateLimited
from perdure.sandboxes.guest.account_exhaustion import exhausted
from perdure.sandboxes.guest.guest_sandbox import DiskTooSmall
from perdure.sandboxes.guest.service_retries import Conflict, Missing

REFUSAL_PASSES_S = 6.5
"""Seconds to wait after a refusal of a token that worked before."""
RELEASE_S = 10.0
"""Seconds to wait before another boot while the account is at its limit or has no capacity."""
FULL = re.compile(r"concurren|quota|limit of|capacity", re.IGNORECASE)


def typed(error: Exception, what: str, *, key_works: bool) -> PerdureError:
    """The failure as one of our errors. `key_works`: the token was accepted before.

    Raises: `error` itself, if it does not come from the service.
    """
    from grpclib.exceptions import StreamTerminatedError
    from h2.exceptions import H2Error
    from modal import exception as modal

    if isinstance(error, PerdureError):
        return error
    if not isinstance(error, modal.Error | OSError | StreamTerminatedError | H2Error):
        raise error  # TimeoutError is an OSError
    said = f"Modal: {what}: {type(error).__name__}: {error}"[:500]
    match error:
        case modal.AuthError():
            if key_works:
                return ControlPlaneError(said, retry_after=REFUSAL_PASSES_S)
            return ConfigurationError(
                f"{said}; start the workers with a valid MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
            )
        case modal.PermissionDeniedError():
            return ConfigurationError(f"{said}; the account of MODAL_TOKEN_ID may not do this")
        case modal.ResourceExhaustedError():
            wait = _retry_after(error)
            if (spent := exhausted(said, retry_after=wait)) is not None:
                return spent
            if FULL.search(str(error)):
                return RateLimited(said, limit="concurrency", retry_after=RELEASE_S)
            return RateLimited(said, retry_after=wait or 1.0)
        case modal.NotFoundError() | modal.SandboxTimeoutError() | modal.SandboxTerminatedError():
            return Missing(said)
        case modal.AlreadyExistsError() | modal.ConflictError():
            return Conflict(said)
        case modal.InvalidError() | modal.VersionError():
            return ConfigurationError(said)
        case modal.SandboxFilesystemError() if "space" in str(error).lower():
            return DiskTooSmall(f"{said}; the sandbox's disk is full")
    return ControlPlaneError(said)


def _retry_after(error: Exception) -> float | None:
    """Seconds that the service named."""
    from modal_proto import api_pb2

    details = getattr(error, "_grpc_details", None) or ()
    named = (one.retry_after_secs for one in details if isinstance(one, api_pb2.RPCRetryPolicy))
    return next(named, None)
