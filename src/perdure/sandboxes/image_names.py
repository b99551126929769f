"""Image names as each provider uses them: mirrors, templates and routing tags.

`image_pulls` pulls them. A row names the image of its instance (`perdure.instances.rows.image_rules`).
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from perdure.errors import ConfigurationError

MAP_VARIABLE = "PERDURE_SANDBOX__IMAGE_MAP"
TAGS_VARIABLE = "PERDURE_E2B__METADATA_FILE"
KEY_VARIABLE = "PERDURE_E2B__METADATA_IMAGE_KEY"


def prebuilt(provider: str, image: str, image_map: Path | None) -> str:
    """The template, snapshot or image that this provider uses for `image`, from the JSON file
    `image_map`: image -> what was built from it, for all providers or `{"e2b": ..., "daytona": ...}`.

    Raises: ConfigurationError naming the file and what is wrong in it.
    """
    if image_map is None:
        return image
    found = json_object(image_map, MAP_VARIABLE).get(image, image)
    if isinstance(found, dict):
        found = found.get(provider, image)
    if not isinstance(found, str):
        raise ConfigurationError(f"{MAP_VARIABLE}: {image_map}: {image!r} must name a string")
    return found


def routing_tags(image: str | None, file: Path | None, key: str) -> dict[str, str]:
    """Tags for a new sandbox, with the image under `key`; empty without a file. A gateway that reads
    a sandbox's image from its metadata needs them.

    Raises: ConfigurationError naming the variable and the fix.
    """
    if file is None:
        return {}
    tags = {str(name): str(value) for name, value in json_object(file, TAGS_VARIABLE).items()}
    if not key:
        raise ConfigurationError(
            f"{TAGS_VARIABLE} is set: set {KEY_VARIABLE} to the key that names the image there"
        )
    if key not in tags:
        raise ConfigurationError(
            f"{TAGS_VARIABLE}: {file} lacks the key {key!r} that {KEY_VARIABLE} names"
        )
    return {**tags, key: image} if image is not None else tags


def json_object(path: Path, variable: str) -> dict[str, Any]:
    """The JSON file that a variable names. Raises: ConfigurationError naming both."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{variable}: {path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{variable}: {path} must hold one JSON object")
    return found


def mirrored(name: str, mirror: str) -> str:
    """The name to pull. `mirror`: `mirror.example/hub/` is put before every name;
    `docker.io=mirror.example/hub,...` replaces registries.

    Example: mirrored("python:3.11", "docker.io=mirror.example/hub") -> "mirror.example/hub/library/python:3.11"
    """
    if "=" not in mirror:
        return mirror + name
    registry, path = _parts(name)
    for rule in mirror.split(","):
        wanted, _, instead = rule.strip().partition("=")
        if wanted == registry:
            return f"{instead.rstrip('/')}/{path}"
    return name


def _parts(name: str) -> tuple[str, str]:
    """The registry and the rest of a name, as Docker parses it."""
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return first, rest
    return "docker.io", name if slash else f"library/{name}"


def registry_of(name: str) -> str:
    """Example: registry_of("python:3.11") -> "docker.io"."""
    return _parts(name)[0]


def key_of(name: str) -> str:
    """The file name that Perdure uses for an image."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]
