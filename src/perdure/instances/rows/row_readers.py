"""Reads rows from files (JSONL, JSON, parquet) and the Hugging Face hub, unchanged. The formats
interpret their fields.
"""

import datetime
import importlib.metadata
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from perdure.errors import ConfigurationError, MissingDependency
from perdure.installation import command_for_extra
from perdure.instances.rows.task_folders import fields_of, task_folders
from perdure.settings import process_environment

HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+(:[\w.-]+)?$")
DEFAULT_SPLIT = "test"
HUB = "https://huggingface.co"
CONNECT_S = 5.0


class Hub(NamedTuple):
    """A dataset of the Hugging Face hub."""

    name: str
    """`owner/name`, or the path of a folder with such a dataset's files."""
    split: str = DEFAULT_SPLIT
    revision: str | None = None
    """A commit of its repository; None: the newest."""
    config: str | None = None
    """The name of a subset."""


class NumberedRow(NamedTuple):
    """A row as stored. `number` counts from 1; in JSONL it is the line number.

    If the row cannot be read, `problem` says why, so that reading continues after a bad line.
    """

    number: int
    fields: dict[str, Any]
    problem: str = ""


def read_rows(source: str | Path) -> Iterator[NumberedRow]:
    """Rows of a .jsonl, .json or .parquet file, of a folder of tasks (`rows.folders`), of a folder
    that the library `datasets` can load, or of a hub name `owner/name[:split]`.

    An existing folder wins over a hub name. Raises: ConfigurationError when the source is none of
    these; MissingDependency.
    """
    path = Path(source)
    if path.is_file():
        return _read_file(path)
    folder, _, split = str(source).partition(":")
    if path.is_dir() and (tasks := task_folders(path)):
        return _read_tasks(tasks)
    if Path(folder).is_dir():
        return _read_folder(folder, split)
    if not path.suffix and HUB_NAME.match(str(source)):
        return read_hub(Hub(folder, split or DEFAULT_SPLIT))
    raise ConfigurationError(
        f"no rows at {str(source)!r}: give a .jsonl, .json or .parquet file that exists, "
        "a folder of them, or a Hugging Face name owner/name[:split]"
    )


def read_hub(hub: Hub) -> Iterator[NumberedRow]:
    """Rows that the library `datasets` loads, from the hub or from its cache.

    Raises: ConfigurationError with the library's own message; MissingDependency.
    """
    rows = _load(hub.name, hub.config, split=hub.split, revision=hub.revision)
    for number, row in enumerate(rows, start=1):
        yield _checked(number, row)


def _read_file(path: Path) -> Iterator[NumberedRow]:
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigurationError(
            f"{path.name} has no known file type: rows must be in a .jsonl, .json or .parquet file"
        )
    return reader(path)


def _read_jsonl(path: Path) -> Iterator[NumberedRow]:
    # Split bytes at \n only, because text mode would also change \r\n to \n.
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parsed(number, line)


def _parsed(number: int, line: bytes) -> NumberedRow:
    try:
        return _checked(number, json.loads(line.decode("utf-8-sig")))
    except ValueError as error:
        return NumberedRow(number, {}, f"row {number} is not valid JSON: {error}")


def _read_json(path: Path) -> Iterator[NumberedRow]:
    try:
        document = json.loads(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        raise ConfigurationError(f"{path.name} is not valid JSON: {error}") from error
    rows = document if isinstance(document, list) else [document]
    for number, row in enumerate(rows, start=1):
        yield _checked(number, row)


def _read_parquet(path: Path) -> Iterator[NumberedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ConfigurationError(f"{path.name} is not a parquet file: {error}") from error
    number = 0
    with file:
        for batch in file.iter_batches(batch_size=64):
            for row in batch.to_pylist():
                number += 1
                yield _checked(number, row)


def _read_tasks(tasks: list[Path]) -> Iterator[NumberedRow]:
    for number, task in enumerate(tasks, start=1):
        try:
            yield NumberedRow(number, fields_of(task))
        except ValueError as error:
            yield NumberedRow(number, {}, f"row {number}, the folder {task.name}: {error}")


def _read_folder(folder: str, split: str) -> Iterator[NumberedRow]:
    """Without `split`, read `test`, or the only split."""
    splits = _load(folder)
    name = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in splits else next(iter(splits), ""))
    if name not in splits or (not split and name != DEFAULT_SPLIT and len(splits) > 1):
        known = ", ".join(f"{folder}:{known}" for known in splits)
        raise ConfigurationError(f"{folder} has the splits {known or 'none'}: name one of them")
    for number, row in enumerate(splits[name], start=1):
        yield _checked(number, row)


def _load(name: str, config: str | None = None, **options: Any) -> Any:
    try:
        importlib.metadata.version("datasets")  # a folder datasets/ imports too
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependency(
            "reading a folder or the Hugging Face hub needs the package `datasets`: "
            f"{command_for_extra('instances')}"
        ) from None
    away = "" if Path(name).is_dir() else hub_unreachable_reason()
    if away:  # online, the library would retry for minutes; its cache may have the rows
        process_environment.force({"HF_HUB_OFFLINE": "1"})
    import datasets

    given = {key: value for key, value in options.items() if value is not None}
    try:
        return datasets.load_dataset(name, config, **given)
    except Exception as error:  # the library raises many types
        if away:
            raise ConfigurationError(
                f"cannot load {name!r}: {away}, and its cache has no copy; check the network,"
                " HTTPS_PROXY or HF_ENDPOINT"
            ) from None
        where = "" if Path(name).is_dir() else " from the Hugging Face hub"
        asked = "".join(f" ({key} {value!r})" for key, value in given.items())
        raise ConfigurationError(f"cannot load {name!r}{asked}{where}: {error}") from error


def hub_unreachable_reason() -> str:
    """Why the Hugging Face hub cannot be reached; empty if it can, or if a proxy is set."""
    proxies = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    if any(process_environment.foreign(name) for name in proxies):
        return ""
    endpoint = urlsplit(process_environment.foreign("HF_ENDPOINT") or HUB)
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), CONNECT_S).close()
    except OSError as error:
        return f"the Hugging Face hub at {endpoint.netloc} cannot be reached ({error})"
    return ""


def _checked(number: int, row: Any) -> NumberedRow:
    if not isinstance(row, dict):
        return NumberedRow(number, {}, f"row {number} is not an object but {type(row).__name__}")
    return NumberedRow(number, {name: _plain(value) for name, value in row.items()})


def _plain(value: Any) -> Any:
    """Convert a time of parquet or the hub to text, as other rows give it."""
    return value.isoformat() if isinstance(value, datetime.date) else value
