"""`make test-images`: images that this host builds and serves itself, through podman, and pulls through docker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import docker_engine, small_image
from tests.images import image_registry, podman_storage
from tests.images.podman_storage import Podman, podman_in


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    folder = tmp_path_factory.mktemp("podman")
    if (
        missing := image_registry.why_not()
        or podman_storage.why_not(folder)
        or small_image.why_not()
    ):
        pytest.skip(missing)
    with podman_in(folder) as made:
        yield made


@pytest.fixture(scope="session")
def registry_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("registry")


@pytest.fixture(scope="session")
def open_registry(podman: Podman, registry_folder: Path) -> Iterator[str]:
    """The address of a registry that asks for no password."""
    with image_registry.serving(registry_folder) as address:
        podman.trust([address])
        yield address


@pytest.fixture(scope="session")
def docker_address() -> Iterator[str]:
    if missing := docker_engine.why_not():
        pytest.skip(missing)
    with docker_engine.without_images("overlay2") as address:
        yield address
