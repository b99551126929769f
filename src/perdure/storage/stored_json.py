"""A model as a stored JSON file that contains a digest of its own text, so that a read detects
damage.

The digest is the last field. A file without a digest was written by hand or by another program, and
is accepted.
"""

import hashlib
import re
from typing import TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)
DIGEST = re.compile(rb',\n "content_sha256": "([0-9a-f]{64})"\n}$')


class Damaged(ValueError):
    """A stored object is damaged. The message names it."""


def encode(model: BaseModel) -> bytes:
    text = model.model_dump_json(indent=1).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    return text.removesuffix(b"\n}") + b',\n "content_sha256": "' + digest + b'"\n}'


def check(key: str, data: bytes) -> None:
    """Raises: Damaged if the text does not match its digest."""
    found = DIGEST.search(data)
    if found is None:
        return
    text = data[: found.start()] + b"\n}"
    if hashlib.sha256(text).hexdigest().encode() != found[1]:
        raise Damaged(f"{key} is unreadable: its sha256 differs")


def check_file(key: str, data: bytes, sha256: str) -> bytes:
    """Return `data` if it has this digest, or if no digest is known. Raises: Damaged."""
    if sha256 and hashlib.sha256(data).hexdigest() != sha256:
        raise Damaged(f"{key} is unreadable: its sha256 differs")
    return data


def decode(key: str, data: bytes, model: type[Model]) -> Model:
    """Raises: Damaged, with a message of one line."""
    check(key, data)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f"`{where}`: {first['msg']}" if where else first["msg"]
        raise Damaged(f"{key} is unreadable: {problem}") from error
