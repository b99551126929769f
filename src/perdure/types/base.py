"""Base classes of all models, and bytes in JSON."""

import base64
from typing import Annotated, Any, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    ValidationError,
)
from pydantic._internal._model_construction import ModelMetaclass  # what `type(BaseModel)` is

from perdure.errors import ConfigurationError
from perdure.types.validation_errors import faults


class Frozen(BaseModel):
    """Immutable data that Perdure itself wrote. Ignores unknown fields, which a later version may
    add."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class _Refusing(ModelMetaclass):
    """Metaclass that turns pydantic's error in a constructor call into a one-line message."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            refused = faults(error, cast("type[BaseModel]", cls))
        raise ConfigurationError(f"{cls.__name__}: {refused}")


class Request(BaseModel, metaclass=_Refusing):
    """Immutable data that a user or a program passes in. Refuses unknown fields by name.

    `Request(...)` raises ConfigurationError. `model_validate` raises pydantic's error.
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
"""Bytes. In JSON they are text if they are UTF-8 (CRLF is kept), otherwise {"base64": ...}."""
