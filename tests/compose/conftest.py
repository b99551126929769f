"""`make test-compose`: docker-compose.yml started by podman, from an image built here on Debian packages."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout_paths import ROOT
from tests.compose import stack
from tests.compose.stack import Compose
from tests.images import debian, podman_storage
from tests.images.podman_storage import Podman, podman_in

PACKAGES = (
    "bubblewrap", "build-essential", "ca-certificates", "git", "python3", "python3-venv", "util-linux"
)  # fmt: skip
DEBIAN = "podman runc netavark aardvark-dns iptables mmdebstrap"
PROGRAMS = (
    "mmdebstrap",
    "/usr/lib/podman/netavark",
    "/usr/lib/podman/aardvark-dns",
    "iptables",
    "podman-compose",
)
BASE = "localhost/perdure-test/base:1"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
"""What this host trusts, the image trusts."""
NETWORK = '[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = "{folder}/networks"\n'


@pytest.fixture(scope="session")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    folder = tmp_path_factory.mktemp("podman")
    if reason := _why_not(folder):
        pytest.skip(reason)
    with podman_in(folder, NETWORK.format(folder=folder)) as made:
        yield made


def _why_not(folder: Path) -> str:
    """Empty, or all that is missing here, and how to get it."""
    missing = [f"no {name}" for name in PROGRAMS if not shutil.which(name)]
    if refused := podman_storage.why_not(folder):
        missing.append(refused)
    how = f"`make test-compose` as root, after apt-get install {DEBIAN} on Debian 12"
    return f"{'; '.join(missing)}: {how}" if missing else ""


@pytest.fixture(scope="session")
def image(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> str:
    """infra/images/Dockerfile over Debian's packages."""
    context = tmp_path_factory.mktemp("base")
    shutil.copy(CERTIFICATES, context / "trusted.crt")
    podman("import", "--quiet", str(debian.archive(context, PACKAGES)), BASE)
    (context / "Containerfile").write_text(
        f"FROM {BASE}\nCOPY trusted.crt {CERTIFICATES}\nENV SSL_CERT_FILE={CERTIFICATES}\n"
    )
    podman.build(BASE, str(context))
    build = ["build", "--quiet", "--network=host"]
    file, base = str(ROOT / "infra/images/Dockerfile"), f"PYTHON_IMAGE={BASE}"
    podman(*build, "--build-arg", base, "--file", file, "--tag", stack.IMAGE, str(ROOT))
    podman(*build, "--tag", stack.STAND_INS, str(Path(__file__).parent))
    return stack.IMAGE


@pytest.fixture(scope="session")
def compose(
    podman: Podman, image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compose]:
    """All services run; nothing of them remains afterwards."""
    folder = tmp_path_factory.mktemp("compose") / "perdure"
    folder.mkdir()
    compose = Compose(podman, folder)
    try:
        compose.up()
        yield compose
    finally:
        compose.down()
