"""Failures of the Kubernetes API, typed by what to do next."""

import contextlib
import json
import ssl
from collections.abc import Mapping
from typing import Any

from perdure.errors import ConfigurationError, ControlPlaneError, PerdureError, RateLimited
from perdure.sandboxes.guest.retries import Conflict, Missing

ROLE = "infra/k8s/sandboxes.yaml"
REFUSAL_PASSES_S = 2.0
"""After a 401 of credentials that worked: they are read anew, and may just be renewed."""
RELEASE_S = 10.0
"""Between tries to boot while a quota is used up."""


class Refused(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.retry_after = status, reason, retry_after


def refused_of(status: int, text: str, headers: Mapping[str, str]) -> Refused:
    said: Mapping[str, Any] = {}
    with contextlib.suppress(ValueError):
        said = json.loads(text)
    if not isinstance(said, dict):
        said = {}
    message = str(said.get("message") or text[:200])
    return Refused(status, said.get("reason") or "", message, _seconds(headers))


def _seconds(headers: Mapping[str, str] | None) -> float | None:
    after = "" if headers is None else headers.get("Retry-After", "")
    return float(after) if after.isdigit() else None


def typed(error: Exception, what: str, *, key_works: bool) -> PerdureError:
    """The failure as one of ours. `key_works`: the credentials were accepted before.

    Raises: `error` itself, when it is none of the API's.
    """
    import aiohttp

    if isinstance(error, PerdureError):
        return error
    said = f"Kubernetes: {what}: {str(error) or type(error).__name__}"[:600]
    match error:
        case Refused():
            return _by_status(error.status, said, error, key_works=key_works)
        case aiohttp.WSServerHandshakeError():
            if error.status == 400:  # of the moment: a pod that has not begun, or is over
                return ControlPlaneError(said)
            answer = Refused(error.status, "", error.message, _seconds(error.headers))
            return _by_status(error.status, said, answer, key_works=key_works)
        case aiohttp.ClientConnectorCertificateError() | ssl.SSLCertVerificationError():
            return ConfigurationError(f"{said}; correct the certificate authority of KUBECONFIG")
        case aiohttp.ClientError() | OSError() | ValueError():  # TimeoutError is an OSError
            return ControlPlaneError(said)
    raise error


def _by_status(status: int, said: str, answer: Refused, *, key_works: bool) -> PerdureError:
    match status:
        case 401:
            if key_works:
                return ControlPlaneError(said, retry_after=REFUSAL_PASSES_S)
            return ConfigurationError(f"{said}; give KUBECONFIG credentials that the cluster takes")
        case 403:
            return _forbidden(said)
        case 404:  # the API's own; else a proxy's, which tells nothing about the pod
            return Missing(said) if answer.reason == "NotFound" else ControlPlaneError(said)
        case 409:
            # the other Conflict is two writers of a quota, which passes
            return Conflict(said) if answer.reason == "AlreadyExists" else ControlPlaneError(said)
        case 429:
            return RateLimited(said, retry_after=answer.retry_after or 1.0)
        case 400 | 413 | 422:
            return ConfigurationError(said)
    return ControlPlaneError(said, retry_after=answer.retry_after)


def _forbidden(said: str) -> PerdureError:
    if "exceeded quota" in said:
        return RateLimited(said, limit="concurrency", retry_after=RELEASE_S)
    if "PodSecurity" in said:
        return ConfigurationError(f"{said}; label the namespace as {ROLE} does")
    return ConfigurationError(f"{said}; give the workers' account the Role of {ROLE}")
