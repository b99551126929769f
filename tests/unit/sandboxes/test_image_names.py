"""Images under other names: mirrors, maps and routing tags."""

import json
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.sandboxes import image_names


@pytest.mark.parametrize(
    ("setting", "name", "pulled"),
    [
        ("", "python:3", "python:3"),
        ("mirror.example/hub/", "docker.io/a/b:1", "mirror.example/hub/docker.io/a/b:1"),
        ("docker.io=mirror.example/hub", "python:3", "mirror.example/hub/library/python:3"),
        ("docker.io=mirror.example/hub", "a/b:1", "mirror.example/hub/a/b:1"),
        ("docker.io=m/hub,ghcr.io=m/gh/", "ghcr.io/a/b@sha256:0", "m/gh/a/b@sha256:0"),
        ("docker.io=mirror.example/hub", "localhost:5000/a:1", "localhost:5000/a:1"),
    ],
)
def test_mirror(setting: str, name: str, pulled: str) -> None:
    """A prefix goes before every name; a rule replaces its own registry and no other."""
    assert image_names.mirrored(name, setting) == pulled


def test_map_names_what_was_built(tmp_path: Path) -> None:
    """The map replaces an image with the provider's own template or snapshot."""
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"a:1": {"e2b": "a-1", "daytona": "snapshot:a-1"}, "b:1": "b:2"}))
    asked = [("e2b", "a:1"), ("daytona", "a:1"), ("docker", "a:1"), ("docker", "b:1"), ("e2b", "c")]

    assert [image_names.prebuilt(*pair, path) for pair in asked] == [
        "a-1",
        "snapshot:a-1",
        "a:1",
        "b:2",
        "c",
    ]


def test_routing_tags(tmp_path: Path) -> None:
    """The file's tags, with the instance's image under the key that the setting names."""
    path = tmp_path / "tags.json"
    path.write_text(json.dumps({"pool": "swe", "image": "default:1"}))

    assert image_names.routing_tags("own:2", path, "image") == {"pool": "swe", "image": "own:2"}
    assert image_names.routing_tags(None, path, "image") == {"pool": "swe", "image": "default:1"}


def test_routing_tags_need_the_key_of_the_image(tmp_path: Path) -> None:
    """A file without that key is refused, and the error names the file and the key."""
    (tmp_path / "tags.json").write_text("{}")

    with pytest.raises(ConfigurationError, match=r"tags.json lacks the key 'image'"):
        image_names.routing_tags("a:1", tmp_path / "tags.json", "image")
