"""SWE-bench Multimodal rows: SWE-bench's schema 5 and `image_assets`, the binary files of its patches.

A text patch cannot hold binary files, so the publisher gives their URLs. The import downloads them,
and the grader writes them before the tests run, as swebench 5 does. The browser tests of some
repositories need a sandbox in which Chromium starts.
"""

import base64
import binascii
import urllib.error
import urllib.request
from pathlib import PurePosixPath
from typing import Any

from perdure.instances.rows.formats import swebench
from perdure.instances.rows.row_fields import Row
from perdure.types import Instance

FETCH_TIMEOUT_S = 60.0
MAX_BYTES = 32 << 20
"""Total size limit for the assets of a row, because its instance contains them."""
PARTS = ("test_patch", "patch")
"""swebench writes the assets of both patches before the tests."""
SHAPE = 'a list of {"path": ..., "url": ...}'


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix, also for a URL that cannot be read."""
    assets = row.mapping("image_assets")
    unknown = sorted(set(assets) - {*PARTS, "problem_statement"})
    if unknown:
        raise row.wrong("image_assets", f"unknown key `{unknown[0]}`; use {', '.join(PARTS)}")
    source = row.optional_text("data_source", "swe-bench-multimodal")
    instance = swebench.to_instance(Row(row.number, {**row.fields, "data_source": source}), dataset)
    files: dict[str, bytes] = {}
    for part in PARTS:
        for asset in _listed(row, part, assets.get(part)):
            path = _path(row, part, asset)
            files[path] = _content(row, part, asset, MAX_BYTES - sum(map(len, files.values())))
    shown = [image for image in assets.get("problem_statement") or [] if isinstance(image, str)]
    grading = instance.grading.model_copy(update={"files": files})
    metadata = {**instance.metadata, "images": shown} if shown else instance.metadata
    return instance.model_copy(update={"grading": grading, "metadata": metadata})


def _listed(row: Row, part: str, assets: Any) -> list[dict[str, Any]]:
    found = assets or []
    if not isinstance(found, list) or not all(isinstance(asset, dict) for asset in found):
        raise row.wrong(f"image_assets.{part}", f"give {SHAPE}")
    return found


def _path(row: Row, part: str, asset: dict[str, Any]) -> str:
    path = asset.get("path")
    inside = isinstance(path, str) and path and not path.startswith("/")
    if not inside or {"..", ".git"} & set(PurePosixPath(str(path)).parts):
        problem = f"`path` is {path!r}: give a file's path below the repository"
        raise row.wrong(f"image_assets.{part}", problem)
    return str(path)


def _content(row: Row, part: str, asset: dict[str, Any], left: int) -> bytes:
    """The decoded `content`; without it, the download of `url`."""
    name, url = f"image_assets.{part}", asset.get("url")
    try:
        if given := asset.get("content"):
            data = base64.b64decode(given, validate=True)
        else:
            data = _fetched(row, name, url, left)
    except (OSError, ValueError, TypeError, binascii.Error) as error:
        problem = f"{url or asset['path']!r} cannot be read: {error}"
        raise row.wrong(
            name, f"{problem}. Make the URL reachable, or give `content` in base64"
        ) from error
    if len(data) > left:
        raise row.wrong(name, f"its files exceed {MAX_BYTES >> 20} MiB in total")
    return data


def _fetched(row: Row, name: str, url: Any, left: int) -> bytes:
    if not isinstance(url, str) or not url.startswith(("https://", "http://")):
        raise row.wrong(name, f"`url` is {url!r}: give an http address, or `content` in base64")
    with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:
        data: bytes = answer.read(left + 1)
        return data
