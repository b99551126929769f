"""The two kinds of data, and the texts that are safe in names."""

import base64
import re
from typing import Annotated, Any, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    StringConstraints,
    ValidationError,
)
from pydantic._internal._model_construction import ModelMetaclass  # what `type(BaseModel)` is

from perdure.errors import ConfigurationError
from perdure.types.faults import faults


class Frozen(BaseModel):
    """Data Perdure wrote itself: immutable; unknown fields of a later version are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Refusing(ModelMetaclass):
    """Of classes that a program fills by hand: what is wrong is one line, without pydantic's text."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            refused = faults(error, cast("type[BaseModel]", cls))
        raise ConfigurationError(f"{cls.__name__}: {refused}")


class Request(BaseModel, metaclass=_Refusing):
    """Data a person or a program hands us: immutable; an unknown field is refused by name.

    `Request(...)` raises ConfigurationError; `model_validate` raises pydantic's error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


def _bytes_in(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    if isinstance(value, dict) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"])
    return value


def _bytes_out(value: bytes) -> Any:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode("ascii")}


Bytes = Annotated[bytes, BeforeValidator(_bytes_in), PlainSerializer(_bytes_out, when_used="json")]
"""Bytes that read as text in JSON where they are UTF-8 (CRLF kept), as {"base64": ...} otherwise."""


SLUG = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


Slug = Annotated[str, StringConstraints(pattern=SLUG)]
"""A name that is safe in keys, paths and workflow ids: letters, digits, dot, dash, underscore."""


INSTANCE_REF = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}/[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"


InstanceRef = Annotated[str, StringConstraints(pattern=INSTANCE_REF)]
"""`<dataset>/<instance_id>`, e.g. `first-steps/click-8.1.3`: names an instance in the store."""


_SAFE = re.compile(r"[^A-Za-z0-9._-]+")


def slugify(text: str) -> str:
    """Turn any text into a Slug: unsafe runs become one dash, 128 characters at most."""
    slug = _SAFE.sub("-", text).strip("-._")[:128]
    return slug or "x"
