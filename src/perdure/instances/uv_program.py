"""Runs the host's uv, and finds the URL of an sdist with it.

Index, mirror and certificate settings are uv's own files and variables; this module names no host.
"""

import datetime
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from perdure.errors import Boundary, InstanceError, RetryHere
from perdure.python_interpreters import find_uv
from perdure.sandboxes.base import Mount
from perdure.settings import process_environment

UNREACHABLE = re.compile(
    rb"Failed to fetch|Request failed|error sending request|tcp connect error|dns error"
    rb"|Tunnel connection failed: 50\d|Temporary failure in name resolution|Connection refused|timed out|operation timed out"
)
"""Messages of uv and pip that mean that the registry failed, not that the request was wrong."""
LAST_CAUSE = 300
"""Characters of uv's last cause that an error message quotes."""

REGISTRY_VARIABLES = re.compile(
    r"^(UV_(DEFAULT_INDEX|INDEX.*|EXTRA_INDEX_URL|FIND_LINKS|INSECURE_HOST|NATIVE_TLS|SYSTEM_CERTS"
    r"|HTTP_TIMEOUT|KEYRING_PROVIDER)"
    r"|PIP_(INDEX_URL|EXTRA_INDEX_URL|FIND_LINKS|TRUSTED_HOST|CERT|DEFAULT_TIMEOUT)"
    r"|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|https?_proxy|no_proxy|all_proxy)$",
    re.IGNORECASE,
)

CERTIFICATE_FILES = {"SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
CONFIG_FILES = {
    "UV_CONFIG_FILE": ("~/.config/uv/uv.toml", "/etc/uv/uv.toml"),
    "PIP_CONFIG_FILE": ("~/.config/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf"),
}
"""Configuration files of uv and pip, nearest first."""


class Sdist(NamedTuple):
    """The index's entry for a source distribution."""

    url: str
    sha256: str
    uploaded: datetime.datetime | None = None
    """None: the index does not say."""


@functools.lru_cache(maxsize=256)
def locate_sdist(requirement: str) -> Sdist:
    """Find the sdist of a pinned requirement in the configured index; the result is cached.


    Raises: InstanceError when there is none; RetryHere when the index cannot be reached.
    """
    # The first call proves that a wheel has the metadata. Without a wheel, the second call would
    # make uv run the sdist's setup.py on this host.
    _compile(requirement, "--no-build")
    package = tomllib.loads(_compile(requirement).decode())["packages"][0]
    sdist = package.get("sdist", {})
    if "url" not in sdist:
        raise InstanceError(f"`source.requirement` {requirement!r} has no source distribution")
    return Sdist(sdist["url"], sdist["hashes"]["sha256"], sdist.get("upload-time"))


def registry_settings() -> tuple[dict[str, str], tuple[Mount, ...]]:
    """The variables and files with which a build sandbox reaches the same registry as this host."""
    env = process_environment.matching(REGISTRY_VARIABLES)
    mounts = [Mount(path, str(path)) for path in sorted(_certificates(env))]
    for variable, candidates in CONFIG_FILES.items():
        given = process_environment.foreign(variable)
        for path in (Path(name).expanduser() for name in ([given] if given else candidates)):
            if path.is_file():
                env[variable] = f"/opt/perdure/config/{path.name}"
                mounts.append(Mount(path.absolute(), env[variable]))
                break
    return env, tuple(mounts)


def _certificates(env: dict[str, str]) -> set[Path]:
    """Certificate files outside /etc/ssl/certs, which every sandbox has."""
    files = {Path(value) for name, value in env.items() if name in CERTIFICATE_FILES}
    return {f for f in files if f.is_file() and not f.is_relative_to("/etc/ssl/certs")}


def _compile(requirement: str, *options: str) -> bytes:
    words = ["--no-deps", "--format", "pylock.toml", "-q", "--python", sys.executable]
    command = ["pip", "compile", "-", *words, *options]
    result = run(command, requirement.encode())
    if result.returncode == 0:
        return result.stdout
    said = " ".join(result.stderr.decode("utf-8", "replace").split())
    if UNREACHABLE.search(result.stderr):
        cause = said.rpartition("Caused by: ")[2].removeprefix("error: ")
        raise RetryHere(
            f"the package index cannot be reached: {cause[:LAST_CAUSE]}; check the network, HTTPS_PROXY,"
            " or set UV_DEFAULT_INDEX to a mirror",
            boundary=Boundary.INSTANCE,
        )
    raise InstanceError(f"`source.requirement` {requirement!r} cannot be used: {said}")


def run(arguments: Sequence[str], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run uv in the root folder, so that no surrounding project or workspace affects it."""
    return subprocess.run(
        [find_uv(), *arguments], input=stdin, capture_output=True, cwd="/", check=False
    )
