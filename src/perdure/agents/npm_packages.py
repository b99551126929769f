"""Installs pinned, verified npm packages in the tool cache, without npm and Node.

`npm pack` took two to three times as long and compares a tarball with the registry, not with our lock.

`locks/<name>.json` names the package, version and sha512 for each platform. On a host without a
registry, the setting PERDURE_AGENTS__<NAME>_TARBALL names a tarball instead.
"""

import base64
import hashlib
import http.client
import json
import lzma
import platform
import ssl
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from perdure.agents import npm_config, tool_cache
from perdure.errors import AgentError, MissingDependency

LOCKS = Path(__file__).parent / "locks"
PLATFORMS = {"x86_64": "linux-x64", "amd64": "linux-x64", "aarch64": "linux-arm64"}
ANY = "any"
"""The platform of a package without machine code."""
TRIES = 3
TIMEOUT_S = 120.0
"""Timeout for each read, in seconds. The whole download may take longer."""
BLOCK = 1 << 20


@dataclass(frozen=True)
class Package:
    """One exact tarball of the registry.

    Example:
        Package("@openai/codex", "0.169.0-linux-x64", "sha512-o05NyAOC...")
    """

    name: str
    version: str
    integrity: str

    @property
    def path(self) -> str:
        """The tarball's path below the registry's URL, the same in every npm registry."""
        return f"{self.name}/-/{self.name.rpartition('/')[2]}-{self.version}.tgz"


async def installed(tools: Path, name: str, tarball: Path | None = None) -> Path:
    """The folder with the content of the tarball's first folder (`package/`).

    `tarball`: one that the settings name, to use instead of the registry's.
    Raises: AgentError when the registry does not deliver the tarball, or its hash is not the
    lock's; MissingDependency on a platform that the lock lacks, or when a named tarball is absent.
    """
    if tarball is not None:
        if not tarball.is_file():
            raise MissingDependency(f"{variable(name)}={tarball}: no such file; name the tarball")
        known, own = tarball.stat(), tarball.absolute()
        recipe = f"{own} {known.st_size} {known.st_mtime_ns}"
        return await tool_cache.built(tools, name, recipe, lambda folder: unpack(own, folder))
    lock = json.loads((LOCKS / f"{name}.json").read_text())
    package = locked(name, lock)
    recipe = f"{package.name} {package.version} {package.integrity}"
    return await tool_cache.built(tools, name, recipe, lambda folder: _fetch(package, folder))


def locked(name: str, lock: Mapping[str, Any]) -> Package:
    """The package for this platform. Raises: MissingDependency naming the platform and the fix."""
    here = PLATFORMS.get(platform.machine().lower(), platform.machine())
    entry = lock.get(here) or lock.get(ANY)
    if entry is None:
        raise MissingDependency(
            f"{name} has no package for {here}; name a tarball of one in {variable(name)}"
        )
    return Package(entry["package"], entry["version"], entry["integrity"])


def variable(name: str) -> str:
    return f"PERDURE_AGENTS__{name.upper()}_TARBALL"


def integrity(name: str, version: str) -> str:
    """The hash that the registry publishes for this version. Raises: AgentError without one."""
    config = npm_config.load()
    url = f"{config.registry(name)}{name.replace('/', '%2f')}/{version}"
    try:
        with _opened(url, config) as answer:
            return str(json.loads(answer.read())["dist"]["integrity"])
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        raise AgentError(f"{_host(url)} does not describe {name}@{version}: {error}") from error


def _fetch(package: Package, folder: Path) -> None:
    tarball = folder.with_name(f"{folder.name}.tgz")
    try:
        _download(package, tarball)
        unpack(tarball, folder)
    finally:
        tarball.unlink(missing_ok=True)


def _download(package: Package, to: Path) -> None:
    """Retries a broken connection, a 429 and a 5xx; never another status, such as 404."""
    config = npm_config.load()
    url = config.registry(package.name) + package.path
    for attempt in range(1, TRIES + 1):
        try:
            return _verified(package, url, config, to)
        except urllib.error.HTTPError as error:
            error.close()
            problem: Exception = error
            if error.code < 500 and error.code != 429:
                break
        except (OSError, http.client.HTTPException) as error:
            problem = error
        if attempt < TRIES:
            time.sleep(2.0**attempt)
    raise AgentError(
        f"cannot download {package.name}@{package.version} from {_host(url)}: {problem}; "
        "set npm's registry, or name a tarball (docs/agents.md)"
    ) from problem


def _verified(package: Package, url: str, config: npm_config.Npmrc, to: Path) -> None:
    """Download once. Raises: AgentError when the hash is not the lock's."""
    algorithm, _, expected = package.integrity.partition("-")
    digest = hashlib.new(algorithm)
    with _opened(url, config) as answer, to.open("wb") as file:
        while block := answer.read(BLOCK):
            digest.update(block)
            file.write(block)
    if base64.b64encode(digest.digest()).decode() != expected:
        raise AgentError(
            f"{package.name}@{package.version}: wrong {algorithm}; nothing was unpacked"
        )


def _opened(url: str, config: npm_config.Npmrc) -> AbstractContextManager[IO[bytes]]:
    request = urllib.request.Request(url)
    if authorization := config.authorization(url):
        request.add_unredirected_header("Authorization", authorization)  # not sent to other hosts
    context = ssl.create_default_context(cafile=config.cafile)
    opened: IO[bytes] = urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context)
    return opened


def unpack(tarball: Path, folder: Path) -> None:
    """Unpack regular files below `folder`; like npm, skip links and devices.

    Raises: AgentError when it is not a tarball, or a name points out of the folder.
    """
    try:
        with tarfile.open(tarball) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isreg() else None
                if content is not None:
                    _write(folder / _inside(member.name), content, executable=member.mode & 0o111)
    except (tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise AgentError(f"{tarball.name} cannot be unpacked: {error}") from error
    if not folder.is_dir():
        raise AgentError(f"{tarball.name} contains no files")


def _inside(name: str) -> PurePosixPath:
    """The path below the tarball's first folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
        raise AgentError(f"the tarball contains {name!r}, which is not inside its first folder")
    return PurePosixPath(*path.parts[1:])


def _write(path: Path, content: IO[bytes], *, executable: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        while block := content.read(BLOCK):
            file.write(block)
    path.chmod(0o755 if executable else 0o644)


def _host(url: str) -> str:
    """The URL's host, without the user name and password that it may contain."""
    return url.partition("//")[2].partition("/")[0].rpartition("@")[2]
