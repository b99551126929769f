"""Images under other names: mirrors, maps and routing tags; one pull for all; refusals by kind."""

import asyncio
import json
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, ControlPlaneError, InstanceError, PerdureError
from perdure.sandboxes import images


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
    assert images.mirrored(name, setting) == pulled


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("manifest for a/b:1 not found: manifest unknown", InstanceError),
        ("pull access denied for a/b, repository does not exist", InstanceError),
        ("toomanyrequests: You have reached your pull rate limit", ControlPlaneError),
        ("dial tcp: lookup registry: no such host", ControlPlaneError),
        ("received unexpected HTTP status: 503 Service Unavailable", ControlPlaneError),
        ("net/http: TLS handshake timeout", ControlPlaneError),
        (
            "Get https://r/v2/: dial tcp 10.0.0.1:443: connect: connection refused",
            ControlPlaneError,
        ),
    ],
)
def test_refused_pull(said: str, kind: type[PerdureError]) -> None:
    """A missing image fails its instance; an unreachable registry is tried again."""
    assert type(images.refused("a/b:1", said)) is kind


def test_pull_limit_is_waited_for() -> None:
    """After a rate limit a registry is not asked again at once."""
    error = images.refused("a/b:1", "429 Too Many Requests")

    assert isinstance(error, ControlPlaneError)
    assert error.retry_after == images.LIMIT_PASSES_S


async def test_one_pull_for_all_who_wait(tmp_path: Path) -> None:
    """Eight callers that want an image at once pull it once, and all get it."""
    here: list[str] = []

    async def find(name: str) -> str | None:
        return here[0] if here else None

    async def pull(name: str) -> str:
        await asyncio.sleep(0)
        here.append(f"id of {name}")
        return here[-1]

    got = await asyncio.gather(*(images.present("a:1", tmp_path, "", find, pull) for _ in range(8)))

    assert (got, here) == (["id of a:1"] * 8, ["id of a:1"])


def test_map_names_what_was_built(tmp_path: Path) -> None:
    """The map replaces an image by a provider's own template or snapshot."""
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"a:1": {"e2b": "a-1", "daytona": "snapshot:a-1"}, "b:1": "b:2"}))
    asked = [("e2b", "a:1"), ("daytona", "a:1"), ("docker", "a:1"), ("docker", "b:1"), ("e2b", "c")]

    assert [images.prebuilt(*pair, path) for pair in asked] == [
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

    assert images.routing_tags("own:2", path, "image") == {"pool": "swe", "image": "own:2"}
    assert images.routing_tags(None, path, "image") == {"pool": "swe", "image": "default:1"}


def test_routing_tags_need_the_key_of_the_image(tmp_path: Path) -> None:
    """A file without that key is refused by the names of file and key."""
    (tmp_path / "tags.json").write_text("{}")

    with pytest.raises(ConfigurationError, match=r"tags.json lacks the key 'image'"):
        images.routing_tags("a:1", tmp_path / "tags.json", "image")
