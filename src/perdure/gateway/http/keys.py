"""Reads and checks the keys that callers send: a session's key, or the control token."""

import hmac
from collections.abc import Mapping

from perdure.gateway.base import control_token, session_key


def session_of(secret: bytes, headers: Mapping[str, str]) -> str | None:
    """The session whose key the caller holds; None when the key is missing or wrong."""
    key = _bearer(headers) or headers.get("x-api-key", "").strip()
    session_id = key.rpartition(".")[0]
    expected = session_key(secret, session_id)
    if not session_id or not hmac.compare_digest(key.encode(), expected.encode()):
        return None
    return session_id


def may_control(secret: bytes, headers: Mapping[str, str]) -> bool:
    """Whether the caller holds the control token."""
    return hmac.compare_digest(_bearer(headers).encode(), control_token(secret).encode())


def _bearer(headers: Mapping[str, str]) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
