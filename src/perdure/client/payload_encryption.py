"""Encrypts all payloads that Perdure sends to Temporal: AES-256-GCM with keys from one file.

The file has one key per line, `<id> <base64 of 32 bytes>`. The first key encrypts, and all keys
decrypt. The file is read again when it changes. `perdure.client.temporal_client` applies the codec.
"""

import base64
import binascii
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from temporalio.api.common.v1 import Payload
from temporalio.converter import PayloadCodec

from perdure.errors import ConfigurationError, MissingDependency, RetryHere
from perdure.installation import command_for_extra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

ENCODING, KEY_ID = "encoding", "encryption-key-id"
"""Metadata of an encrypted payload, as in Temporal's samples."""
ENCRYPTED = b"binary/encrypted"
NONCE_BYTES = 12
KEY_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class KeyUnknown(RetryHere):
    """A payload names a key that the file lacks. Temporal retries until the file has the key."""


class Keys:
    """The keys of a file."""

    def __init__(self, file: Path) -> None:
        """Raises: ConfigurationError, MissingDependency."""
        self._file = file
        self._seen = (0, 0, 0)
        self._ciphers: dict[str, AESGCM] = {}
        self._load()

    def newest(self) -> "tuple[str, AESGCM]":
        """The key that encrypts."""
        self._load()
        return next(iter(self._ciphers.items()))

    def get(self, name: str) -> "AESGCM":
        """Raises: KeyUnknown."""
        if name not in self._ciphers:
            self._load()
        try:
            return self._ciphers[name]
        except KeyError:
            raise KeyUnknown(
                f"a payload is encrypted with key {name!r}, which {self._file} lacks: add it there"
            ) from None

    def _load(self) -> None:
        """Read the file if it has changed. After the first load, a broken file keeps the loaded
        keys."""
        try:
            found = self._file.stat()
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if seen != self._seen:
                self._ciphers = _parsed(self._file, self._file.read_text())
                self._seen = seen
        except OSError as error:
            if not self._ciphers:
                raise ConfigurationError(
                    f"cannot read the codec's keys in {self._file}: {error.strerror}"
                ) from error
        except ConfigurationError:
            if not self._ciphers:
                raise


def _parsed(file: Path, text: str) -> "dict[str, AESGCM]":
    """Raises: ConfigurationError, MissingDependency. No message contains a key."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise MissingDependency(
            f"to encrypt payloads: {command_for_extra('encryption')}"
        ) from error
    found: dict[str, AESGCM] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        key = _decoded(words[1]) if len(words) == 2 and _NAME.fullmatch(words[0]) else b""
        if len(key) != KEY_BYTES or words[0] in found:
            raise ConfigurationError(
                f"{file}:{number}: write '<id> <base64 of {KEY_BYTES} bytes>', each id once, for "
                'example `echo "2026-10 $(openssl rand -base64 32)"`'
            )
        found[words[0]] = AESGCM(key)
    if not found:
        raise ConfigurationError(f"{file} contains no key")
    return found


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        return b""


class EncryptingCodec(PayloadCodec):
    """Encrypts with the newest key, and decrypts with the key that a payload names.

    Accepts unencrypted payloads: those written earlier, and inputs that `temporal` users type.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [self._encrypted(payload) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Raises: KeyUnknown; ConfigurationError if a payload is damaged."""
        return [self._decrypted(payload) for payload in payloads]

    def _encrypted(self, payload: Payload) -> Payload:
        name, cipher = self._keys.newest()
        nonce = os.urandom(NONCE_BYTES)
        hidden = cipher.encrypt(nonce, payload.SerializeToString(), name.encode())
        metadata = {ENCODING: ENCRYPTED, KEY_ID: name.encode()}
        return Payload(metadata=metadata, data=nonce + hidden)

    def _decrypted(self, payload: Payload) -> Payload:
        if payload.metadata.get(ENCODING) != ENCRYPTED:
            return payload
        from cryptography.exceptions import InvalidTag

        name = payload.metadata.get(KEY_ID, b"").decode(errors="replace")
        cipher = self._keys.get(name)
        nonce, hidden = payload.data[:NONCE_BYTES], payload.data[NONCE_BYTES:]
        try:
            return Payload.FromString(cipher.decrypt(nonce, hidden, name.encode()))
        except (InvalidTag, ValueError, DecodeError) as error:
            raise ConfigurationError(
                f"cannot decrypt a payload with key {name!r}: the key or the payload was changed"
            ) from error
