"""Reads and checks the keys that callers send: session keys, the control token, the episodes token."""

import hmac
from collections.abc import Mapping

from perdure.gateway.base import control_token, session_key
from perdure.home_folder import Secrets, episodes_token


def session_of(secrets: Secrets, headers: Mapping[str, str]) -> str | None:
    """The session whose key the caller holds; None if the key is missing or wrong."""
    names = ("x-api-key", "x-goog-api-key")
    key = _bearer(headers) or next((headers[n].strip() for n in names if n in headers), "")
    session_id = key.rpartition(".")[0]
    valid = [session_key(secret, session_id) for secret in secrets.accepted]
    return session_id if session_id and _is_one_of(key, valid) else None


def may_control(secrets: Secrets, headers: Mapping[str, str]) -> bool:
    """Whether the caller holds the control token."""
    return _is_one_of(_bearer(headers), [control_token(secret) for secret in secrets.accepted])


def may_read_episodes(secrets: Secrets, headers: Mapping[str, str]) -> bool:
    """Whether the caller holds the episodes token."""
    return _is_one_of(_bearer(headers), [episodes_token(secret) for secret in secrets.accepted])


def _is_one_of(given: str, valid: list[str]) -> bool:
    """Compares in constant time, however much of a key is right."""
    return any([hmac.compare_digest(given.encode(), one.encode()) for one in valid])


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
