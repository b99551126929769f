"""Reads the parts of npm's configuration that a download needs: registry, scope, key, certificates.

Precedence is npm's: environment, user file, global file. A project's `.npmrc` is ignored.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from perdure.settings.process_environment import variables

PUBLIC = "https://registry.npmjs.org/"
GLOBAL = ("/etc/npmrc", "/usr/etc/npmrc", "/usr/local/etc/npmrc")
"""Where distributions put npm's global file. `NPM_CONFIG_GLOBALCONFIG` names another one."""


@dataclass(frozen=True)
class Npmrc:
    """The values that npm would use; names are lowercase with dashes."""

    values: Mapping[str, str]

    def registry(self, package: str) -> str:
        """The package's registry, ending in a slash; a scope may have its own registry."""
        scope = package.partition("/")[0] if package.startswith("@") else ""
        found = self.values.get(f"{scope}:registry") if scope else None
        return (found or self.values.get("registry") or PUBLIC).rstrip("/") + "/"

    def authorization(self, url: str) -> str | None:
        """The header by the longest `//host/path/` with a key for this URL; None without one."""
        parts = urlsplit(url)
        path = f"//{parts.netloc}{parts.path}".lower()
        while len(path) > 2:
            path = path.rstrip("/").rpartition("/")[0] + "/"
            if token := self.values.get(f"{path}:_authtoken"):
                return f"Bearer {token}"
            if basic := self.values.get(f"{path}:_auth") or self._password(path):
                return f"Basic {basic}"
        return None

    def _password(self, path: str) -> str | None:
        """Base64 of `name:password` for the header; `_password` in the file is base64 itself."""
        user, secret = (self.values.get(f"{path}:{name}") for name in ("username", "_password"))
        if user is None or secret is None:
            return None
        return base64.b64encode(f"{user}:".encode() + base64.b64decode(secret)).decode()

    @property
    def cafile(self) -> str | None:
        return self.values.get("cafile")


def load(environment: Mapping[str, str] | None = None) -> Npmrc:
    """Load npm's configuration. `environment` defaults to this process's variables."""
    environment = variables() if environment is None else environment
    own = {
        name.lower().removeprefix("npm_config_").replace("_", "-"): value
        for name, value in environment.items()
        if name.lower().startswith("npm_config_") and value
    }
    user = own.get("userconfig") or f"{environment.get('HOME') or Path.home()}/.npmrc"
    files = [*([own["globalconfig"]] if "globalconfig" in own else GLOBAL), user]
    values: dict[str, str] = {}
    for file in files:
        values |= _read(Path(file), environment)
    return Npmrc(values | own)


def _read(file: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Read `key = value` lines. Like npm, expand `${NAME}` from the environment."""
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in map(str.strip, lines) if line[:1] not in ("#", ";"))
    return {
        key.strip().lower(): _filled(value.strip().strip("\"'"), environment)
        for key, equals, value in pairs
        if equals
    }


def _filled(value: str, environment: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda found: environment.get(found[1], found[0]), value)
