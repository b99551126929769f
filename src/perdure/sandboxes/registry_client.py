"""Asks registries which layers a pull would transfer, and their compressed sizes. Pulls nothing.

It uses the logins that `podman login` and `docker login` stored. A registry whose certificate only the
puller trusts, or that speaks plain HTTP outside loopback, counts as unreachable.
"""

import asyncio
import base64
import hashlib
import json
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure.errors import PerdureError
from perdure.sandboxes import image_names
from perdure.sandboxes.image_architecture import NAMES
from perdure.settings import process_environment

if TYPE_CHECKING:
    import httpx

HUB = "docker.io"
HUB_HOST, HUB_LOGIN = "registry-1.docker.io", "https://index.docker.io/v1/"
ANSWER_S = 5.0
MOST_BYTES = 8 << 20
"""Largest answer that is read. Registries refuse manifests over 4 MB."""
ACCEPT = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')


class Layer(NamedTuple):
    """A layer of an image at a registry."""

    digest: str
    size: int
    """Bytes, compressed."""
    chain: str
    """Names the layer with all those below it, as `chains` does; empty if unknown."""


class RegistryFailed(PerdureError):
    """The registry did not describe an image. `is_down`: asking it about other images would fail too."""

    def __init__(self, said: str, *, is_down: bool) -> None:
        super().__init__(said)
        self.is_down = is_down


def chains(layers: Iterable[str]) -> Iterator[str]:
    """A name for each layer that depends on those below it. `layers`: uncompressed digests, the lowest
    first. An engine reuses a layer that it has on the same layers."""
    below = ""
    for layer in layers:
        below = hashlib.sha256(f"{below} {layer}".encode()).hexdigest()
        yield below


class RegistryClient:
    """The requests of one plan. `http`: an open client with a timeout."""

    def __init__(self, http: "httpx.AsyncClient") -> None:
        self._http = http
        self._tokens: dict[tuple[str, str], str] = {}

    async def layers(self, name: str, *, with_chains: bool) -> Sequence[Layer]:
        """The layers of the image for this host's architecture, the lowest first. `with_chains` costs one
        more request. Raises: RegistryFailed."""
        registry, repository, reference = _parts(name)
        manifest = await self._json(registry, repository, f"manifests/{reference}")
        if "manifests" in manifest:
            digest = _own_digest(name, manifest)
            manifest = await self._json(registry, repository, f"manifests/{digest}")
        try:
            found = [(str(one["digest"]), int(one["size"])) for one in manifest["layers"]]
            config = str(manifest["config"]["digest"]) if with_chains else ""
        except (LookupError, TypeError, ValueError):
            raise RegistryFailed(f"{registry} sent no sizes", is_down=False) from None
        own = [""] * len(found)
        if config:
            described = await self._json(registry, repository, f"blobs/{config}")
            listed = (described.get("rootfs") or {}).get("diff_ids") or ()
            own = [*chains(listed)] if len(listed) == len(found) else own
        return [Layer(*one, chain) for one, chain in zip(found, own, strict=True)]

    async def _json(self, registry: str, repository: str, path: str) -> dict[str, Any]:
        host = HUB_HOST if registry == HUB else registry
        scheme = "http" if _is_loopback(registry) else "https"
        url = f"{scheme}://{host}/v2/{repository}/{path}"
        token = self._tokens.get((registry, repository), "")
        status, headers, body = await self._get(registry, url, token)
        if status == 401:
            token = await self._token(registry, headers.get("www-authenticate", ""))
            self._tokens[registry, repository] = token
            status, headers, body = await self._get(registry, url, token)
        if status != 200:
            what = {401: "refused the login", 403: "refused the login", 404: "lacks the image"}
            what[429] = "limits the rate of requests"
            said = what.get(status, f"answered with status {status}")
            raise RegistryFailed(f"{registry} {said}", is_down=status == 429 or status >= 500)
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RegistryFailed(f"{registry} sent no JSON", is_down=False)
        return found

    async def _token(self, registry: str, challenge: str) -> str:
        """The `Authorization` header that the registry asks for; empty if there is no login."""
        login = await asyncio.to_thread(_login, registry)
        basic = f"Basic {login}" if login else ""
        asked = dict(_PARAMETER.findall(challenge))
        if not challenge.lower().startswith("bearer") or "realm" not in asked:
            return basic
        query = {name: asked[name] for name in ("service", "scope") if name in asked}
        _, _, body = await self._get(registry, asked["realm"], basic, query)
        try:
            found = json.loads(body)
            return f"Bearer {found.get('token') or found['access_token']}"
        except (ValueError, LookupError, AttributeError):
            return basic

    async def _get(
        self, registry: str, url: str, token: str, query: Mapping[str, str] | None = None
    ) -> "tuple[int, Mapping[str, str], bytes]":
        import httpx

        headers = {"Accept": ACCEPT, **({"Authorization": token} if token else {})}
        body = b""
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                self._http.stream("GET", url, params=query, headers=headers) as answer,
            ):
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise RegistryFailed(f"{registry} sent too much", is_down=False)
                return answer.status_code, answer.headers, body
        except (httpx.TimeoutException, TimeoutError):
            raise RegistryFailed(
                f"{registry} did not answer within {ANSWER_S:g} s", is_down=True
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = str(error) or type(error).__name__
            raise RegistryFailed(f"{registry} cannot be reached: {said}", is_down=True) from None


def _parts(name: str) -> tuple[str, str, str]:
    """Registry, repository, and tag or digest."""
    registry = image_names.registry_of(name)
    path = name.removeprefix(f"{registry}/")
    if registry == HUB and "/" not in path:
        path = f"library/{path}"
    path, _, digest = path.partition("@")
    repository, _, tag = path.partition(":")
    return registry, repository, digest or tag or "latest"


def _is_loopback(registry: str) -> bool:
    """Docker speaks plain HTTP there."""
    return registry.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")


def _own_digest(name: str, index: Mapping[str, Any]) -> str:
    """The manifest of this host's architecture in a list of manifests."""
    own = NAMES.get(platform.machine(), platform.machine())
    for one in index["manifests"]:
        built_for = one.get("platform") or {}
        if (built_for.get("os"), built_for.get("architecture")) == ("linux", own):
            return str(one["digest"])
    raise RegistryFailed(f"{image_names.registry_of(name)} has no {own} image", is_down=False)


def _login(registry: str) -> str:
    """The stored login for a registry as HTTP's Basic credentials; empty if there is none."""
    for path in _login_files():
        try:
            found = json.loads(path.read_text())
            for key in (registry, HUB_LOGIN) if registry == HUB else (registry,):
                if given := (found.get("auths") or {}).get(key, {}).get("auth"):
                    return str(given)
                if helper := (found.get("credHelpers") or {}).get(key) or found.get("credsStore"):
                    return _helper_login(helper, key)
        except (OSError, ValueError, AttributeError):
            continue
    return ""


def _login_files() -> Iterator[Path]:
    """Of podman, then of docker."""
    if named := process_environment.foreign("REGISTRY_AUTH_FILE"):
        yield Path(named)
    if runtime := process_environment.foreign("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers/auth.json"
    yield Path.home() / ".config/containers/auth.json"
    yield (
        Path(process_environment.foreign("DOCKER_CONFIG") or Path.home() / ".docker")
        / "config.json"
    )


def _helper_login(helper: str, registry: str) -> str:
    """What docker's credential helper prints; empty if it fails."""
    import subprocess

    try:
        done = subprocess.run(
            [f"docker-credential-{helper}", "get"],
            input=registry,
            capture_output=True,
            check=True,
            text=True,
            timeout=ANSWER_S,
        )
        found = json.loads(done.stdout)
        return base64.b64encode(f"{found['Username']}:{found['Secret']}".encode()).decode()
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        return ""
