"""Removes keys, addresses and paths of machines from what a report publishes."""

import re
from typing import Any

from perdure.sandboxes.image_names import registry_of

HIDDEN, URL, HOST = "<hidden>", "<url>", "<host>"
_SECRET_NAME = re.compile(
    r"(?:^|[_-])(?:api_?key|key|secret|passw(?:or)?d|token|credentials?|auth(?:orization)?)$", re.I
)
_SECRET = re.compile(r"\b(?:sk|pk|hf|ghp|gho|github_pat|xox[abp]|AKIA)[-_]?[A-Za-z0-9_-]{12,}")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"]+", re.I)
_HOST = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\b(?:localhost|[\w-]+(?:\.[\w-]+)+):\d{2,5}\b"
)
_PATH = re.compile(r"(?<![\w.>/])~?(?:/[\w.@+-]+)+/?")
PUBLIC_REGISTRIES = (
    *("docker.io", "ghcr.io", "quay.io", "gcr.io", "mcr.microsoft.com", "public.ecr.aws"),
    "registry.k8s.io",
)


def redacted(value: Any, name: str = "") -> Any:
    """A copy of JSON data without values under a secret's name, URLs, hosts and absolute paths. A
    path keeps its last part: `/models/Qwen3-30B` -> `<path>/Qwen3-30B`."""
    if isinstance(value, dict):
        return {key: redacted(one, str(key)) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redacted(one, name) for one in value)
    if not isinstance(value, str):
        return value
    if _SECRET_NAME.search(name):
        return HIDDEN
    text = _HOST.sub(HOST, _URL.sub(URL, _SECRET.sub(HIDDEN, value)))
    return _PATH.sub(lambda found: f"<path>/{found[0].rstrip('/').rpartition('/')[2]}", text)


def public_image(image: str) -> str:
    """The image's name without a private registry."""
    registry = registry_of(image)
    if not image or registry in PUBLIC_REGISTRIES:
        return image
    return f"<registry>/{image.partition('/')[2]}"
