"""Finds a row's format, and converts the row to an instance.

A new row format is one file with `to_instance(row, dataset)` and one line in `variant_registry.ROWS`.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from perdure import variant_registry
from perdure.instances.rows.format_recognition import recognised, refuse_ambiguous_format
from perdure.instances.rows.row_fields import Row
from perdure.types import Instance, SimulatedUser, slugify

Reader = Callable[[Row, str], Instance]
USER = "simulated_user"
"""A column that a row of any format may have: `Instance.user`."""


def to_instance(
    row: Mapping[str, Any], dataset: str, row_number: int, folder: Path | None = None
) -> Instance:
    """The instance that a row describes. Relative paths in the row start at `folder`.

    Raises: InstanceError with the row's number, the field and the fix.
    """
    read = Row(row_number, row, folder or Path())
    try:
        instance = _format_of(read)(read, dataset)
    except ValidationError as error:
        raise read.invalid(error) from error
    if not read.has(USER):
        return instance
    try:
        user = SimulatedUser.model_validate(read.mapping(USER))
    except ValidationError as error:
        raise read.invalid(error, USER) from error
    return instance.model_copy(update={"user": user})


def dataset_name(source: str | Path) -> str:
    """`data/My rows.jsonl` -> `My-rows`; `owner/name:dev` -> `name-dev`."""
    name = Path(source).name
    return slugify(re.sub(r"\.(jsonl|json|parquet)$", "", name, flags=re.IGNORECASE))


def _format_of(row: Row) -> Reader:
    return _reader_named(row, row.optional_text("data_source") or recognised(row))


def _reader_named(row: Row, source: str) -> Reader:
    known = variant_registry.data_source_named(source)
    if known in variant_registry.HANDLERS:
        return cast(Reader, variant_registry.HANDLERS[known].to_instance)
    if known is not None:
        refuse_ambiguous_format(row, known)
        return cast(Reader, variant_registry.load("row format", variant_registry.ROWS, known))
    if ":" in source:
        return cast(Reader, variant_registry.load("handler", {}, source)().to_instance)
    raise row.wrong("data_source", variant_registry.unknown_data_source(source))
