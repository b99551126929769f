"""Reads tasks that are folders: Harbor's, and plain ones with one file for each long field.

mine-1/
  row.json       every other field of a row, in any known format
  problem.md     -> problem_statement
  gold.patch     -> patch
  tests.patch    -> test_patch
  repo/          -> source: the base tree
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HARBOR, PLAIN = "task.toml", "row.json"
TEXTS = {"problem.md": "problem_statement", "gold.patch": "patch", "tests.patch": "test_patch"}


def task_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a task, and the tasks directly below it, by name."""
    return [path for path in (folder, *sorted(folder.iterdir())) if _is_task(path)]


def fields_of(folder: Path) -> dict[str, Any]:
    """The folder's content as the fields of a row. Raises: ValueError (malformed text or JSON)."""
    if (folder / HARBOR).is_file():
        return {"data_source": "harbor", "task_folder": str(folder.absolute())}
    row = json.loads((folder / PLAIN).read_bytes())
    if not isinstance(row, dict):
        raise ValueError(f"{PLAIN} is not an object")
    return {"instance_id": folder.name, **dict(_files(folder)), **row}


def _files(folder: Path) -> Iterator[tuple[str, Any]]:
    for name, field in TEXTS.items():
        if (folder / name).is_file():
            yield field, (folder / name).read_bytes().decode("utf-8", "surrogateescape")
    if (folder / "repo").is_dir():
        yield "source", {"kind": "directory", "path": str((folder / "repo").absolute())}


def _is_task(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in (HARBOR, PLAIN))
