"""Failures of the Kubernetes API, typed by what to do next."""

import contextlib
import json
import ssl
from collections.abc import Mapping
from typing import Any

from perdure.errors import ConfigurationError, ControlPlaneError, PerdureError, RateLimited
from perdure.sandboxes.guest.service_retries import Conflict, Missing, retry_after

ROLE = "infra/k8s/sandboxes.yaml"
REFUSAL_PASSES_S = 2.0
"""Seconds to wait after a 401 for credentials that worked before. They are also read again."""
RELEASE_S = 10.0
"""Seconds to wait before another boot while a quota is used up."""


class ErrorAnswer(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, reason: str, message: str, retry_after: float | None) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status, self.reason, self.retry_after = status, reason, retry_after


def refused_of(status: int, text: str, headers: Mapping[str, str]) -> ErrorAnswer:
    said: Mapping[str, Any] = {}
    with contextlib.suppress(ValueError):
        said = json.loads(text)
    if not isinstance(said, dict):
        said = {}
    message = str(said.get("message") or text[:200])
    return ErrorAnswer(status, said.get("reason") or "", message, retry_after(headers))


def typed(error: Exception, what: str, *, key_works: bool) -> PerdureError:
    """The failure as one of our errors. `key_works`: the credentials were accepted before.

    Raises: `error` itself, if it does not come from the API.
    """
    import aiohttp

    if isinstance(error, PerdureError):
        return error
    said = f"Kubernetes: {what}: {str(error) or type(error).__name__}"[:600]
    match error:
        case ErrorAnswer():
            return _by_status(error.status, said, error, key_works=key_works)
        case aiohttp.WSServerHandshakeError():
            if error.status == 400:  # transient: the pod has not started yet, or has ended
                return ControlPlaneError(said)
            answer = ErrorAnswer(error.status, "", error.message, retry_after(error.headers or {}))
            return _by_status(error.status, said, answer, key_works=key_works)
        case aiohttp.ClientConnectorCertificateError() | ssl.SSLCertVerificationError():
            return ConfigurationError(f"{said}; correct the certificate authority of KUBECONFIG")
        case aiohttp.ClientError() | OSError() | ValueError():  # TimeoutError is an OSError
            return ControlPlaneError(said)
    raise error


def _by_status(status: int, said: str, answer: ErrorAnswer, *, key_works: bool) -> PerdureError:
    match status:
        case 401:
            if key_works:
                return ControlPlaneError(said, retry_after=REFUSAL_PASSES_S)
            return ConfigurationError(f"{said}; set KUBECONFIG to credentials the cluster accepts")
        case 403:
            return _forbidden(said)
        case 404:  # from the API; a proxy's 404 says nothing about the pod
            return Missing(said) if answer.reason == "NotFound" else ControlPlaneError(said)
        case 409:
            # the other Conflict, two writers of a quota, is transient
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
