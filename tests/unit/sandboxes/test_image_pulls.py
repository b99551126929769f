"""One pull of an image for all its callers, and errors by whether a retry can help."""

import asyncio
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, ControlPlaneError, InstanceError, PerdureError
from perdure.sandboxes.image_pulls import (
    LIMIT_PASSES_S,
    Puller,
    PullFailed,
    Pulls,
    last_error,
    refused,
)

PULLER = Puller(log_in="run `podman login {registry}`", storage="podman's images")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("manifest for a/b:1 not found: manifest unknown", InstanceError),
        ("pull access denied for a/b, repository does not exist", InstanceError),
        (
            "errors: denied: requested access is denied unauthorized: authentication required",
            InstanceError,
        ),
        ("toomanyrequests: You have reached your pull rate limit", ControlPlaneError),
        ("denied: Request exceeded pull rate limit for IP 127.0.0.1", ControlPlaneError),
        ("dial tcp: lookup registry: no such host", ControlPlaneError),
        ("received unexpected HTTP status: 503 Service Unavailable", ControlPlaneError),
        ("net/http: TLS handshake timeout", ControlPlaneError),
        ("mkdir /var/lib/containers/storage: permission denied", ControlPlaneError),
        (
            "Get https://r/v2/: dial tcp 10.0.0.1:443: connect: connection refused",
            ControlPlaneError,
        ),
        ("reading manifest 1 in r/a/b: unauthorized: authentication required", ConfigurationError),
        (
            "unable to retrieve auth token: invalid username/password: unauthorized",
            ConfigurationError,
        ),
        (
            "error getting credentials - err: docker-credential-x: executable file not found",
            ConfigurationError,
        ),
        ("Head https://r/v2/a/b/manifests/1: no basic auth credentials", ConfigurationError),
    ],
)
def test_refused_pull(said: str, kind: type[PerdureError]) -> None:
    """A missing image fails its instance, wrong credentials stop the run, others are retried."""
    assert type(refused("r.example/a/b:1", said, PULLER)) is kind


def test_credentials_name_registry_and_fix() -> None:
    """One message names the registry, the command that logs in, and what else may be wrong."""
    error = refused("m.example/a/b:1", "unauthorized: no", PULLER, asked="docker.io/a/b:1")

    assert str(error) == (
        "registry m.example refused the credentials: image 'm.example/a/b:1': unauthorized: no; run "
        "`podman login m.example`, or correct environment.image of the row ('docker.io/a/b:1') or "
        "PERDURE_SANDBOX__IMAGE_MIRROR"
    )


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("429 Too Many Requests", LIMIT_PASSES_S),
        ("toomanyrequests: retry-after: 1m30s, allowed: 100/hour", 90.0),
        ("toomanyrequests: retry-after: 880.092µs, allowed: 44000/minute", 880.092e-6),
        ("write /usr/lib/libcrypto.so.3: no space left on device", LIMIT_PASSES_S),
    ],
)
def test_pull_limit_is_waited_for(said: str, seconds: float) -> None:
    """A retry waits as long as the registry asks, or a minute, as it does on a full disk."""
    error = refused("a/b:1", said, PULLER)

    assert isinstance(error, ControlPlaneError)
    assert error.retry_after == pytest.approx(seconds)


@pytest.mark.parametrize(
    "said",
    [
        "no matching manifest for linux/arm64/v8 in the manifest list entries",
        "no match for platform in manifest: not found",
        'no image found in image index for architecture "arm64", variant "v8", OS "linux"',
    ],
)
def test_image_of_another_architecture_needs_another_machine(said: str) -> None:
    """The row is right, so the message names where its image would run."""
    error = refused("a/b:1", said, PULLER)

    assert isinstance(error, InstanceError)
    assert str(error).endswith(
        "run the workers in a VM of one of these, or use --sandbox e2b, daytona, modal, or kubernetes"
    )


def test_full_disk_is_named() -> None:
    """The message says which disk lacks space."""
    error = refused("a/b:1", "writing blob: no space left on device", PULLER)

    assert str(error).endswith("free space on the disk of podman's images")


def test_all_lines_of_an_error_count() -> None:
    """Podman prints each error of a registry on its own line, after warnings about its retries."""
    said = 'time="x" level=warning msg="Error: old"\nError: initializing: errors:\ndenied: no\nunauthorized: no\n'

    assert last_error(said) == "Error: initializing: errors: denied: no unauthorized: no"
    assert last_error("unpacking\nFATAL: no") == "FATAL: no"


class Registry:
    """Counts pulls; each ends when it is told to."""

    def __init__(self, said: str = "") -> None:
        self.here: list[str] = []
        self.pulls: list[str] = []
        self.said = said
        self.go_on = asyncio.Event()

    async def find(self, name: str) -> str | None:
        return self.here[0] if self.here else None

    async def pull(self, name: str) -> str:
        self.pulls.append(name)
        await self.go_on.wait()
        if self.said:
            raise PullFailed(self.said)
        self.here.append(f"id of {name}")
        return self.here[-1]


async def test_one_pull_for_all_who_wait(tmp_path: Path) -> None:
    """Eight callers in two processes that want an image at once cause one pull, and all get it."""
    registry = Registry()
    processes = [Pulls(tmp_path, "", PULLER), Pulls(tmp_path, "", PULLER)]
    registry.go_on.set()
    asked = [processes[n % 2].present("a:1", registry.find, registry.pull) for n in range(8)]

    assert await asyncio.gather(*asked) == ["id of a:1"] * 8
    assert registry.pulls == ["a:1"]


async def test_refusal_is_shared(tmp_path: Path) -> None:
    """Callers that waited for a pull get its error, and do not ask the registry again."""
    registry = Registry("toomanyrequests: slow down")
    pulls = Pulls(tmp_path, "m/", PULLER)
    asked = [
        asyncio.create_task(pulls.present("a:1", registry.find, registry.pull)) for _ in range(8)
    ]
    while not registry.pulls:
        await asyncio.sleep(0)
    registry.go_on.set()
    got = await asyncio.gather(*asked, return_exceptions=True)

    assert {type(error) for error in got} == {ControlPlaneError}
    assert registry.pulls == ["m/a:1"]


async def test_pull_outlives_its_first_caller(tmp_path: Path) -> None:
    """If the caller that started a pull is cancelled, the others still get that pull's image."""
    registry = Registry()
    pulls = Pulls(tmp_path, "", PULLER)
    first, second = (
        asyncio.create_task(pulls.present("a:1", registry.find, registry.pull)) for _ in range(2)
    )
    while not registry.pulls:
        await asyncio.sleep(0)
    first.cancel()
    registry.go_on.set()

    assert await second == "id of a:1"
    assert registry.pulls == ["a:1"]
