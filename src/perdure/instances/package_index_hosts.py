"""The hosts that a build may reach: the package indexes that this host's pip and uv use, npm's
registry for rows that install npm packages, and hosts that a setting or the build's own list adds.
"""

import configparser
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from perdure.instances import uv_program
from perdure.sandboxes.host.allow_list import AllowList
from perdure.sandboxes.host.host_addresses import PORTS, Place, is_of_this_host
from perdure.settings import process_environment

PUBLIC_INDEX = ("https://pypi.org", "https://files.pythonhosted.org")
"""The index of a tool for which no index is configured."""
FILES_OF = {"pypi.org": "files.pythonhosted.org", "test.pypi.org": "test-files.pythonhosted.org"}
"""Public index -> the host of its files."""
PUBLIC_NPM = ("https://registry.npmjs.org", "https://registry.yarnpkg.com")
SETTING = "PERDURE_SANDBOX__BUILD_HOSTS"
BUILD_NETWORK = "phases.environment.network"
SHOWN = 4
"""Most refused hosts that a message names."""

_NPM = re.compile(r"\b(npm|npx|pnpm|yarn|corepack)\b")
_URL = re.compile(r"https?://[^\s,\"']+")
_KEYS = ("index-url", "extra-index-url", "find-links")


@dataclass(frozen=True)
class IndexHosts:
    """`configured` places may have any address, because an administrator configured this host to
    use them. `public` ones may not resolve to this host or to link-local addresses."""

    configured: frozenset[Place] = field(default=frozenset())
    public: frozenset[Place] = field(default=frozenset())
    listed: AllowList = field(default=AllowList((), BUILD_NETWORK))
    """Of phases.environment.network."""

    def knows(self, place: Place) -> bool:
        return place in self.configured or self._is_public(place) or self.listed.knows(place)

    def _is_public(self, place: Place) -> bool:
        on_web = place.port in PORTS.values() and Place(place.host, 0) in self.public
        return on_web or place in self.public

    def may_connect(self, place: Place, address: str) -> bool:
        if place in self.configured or (self._is_public(place) and not is_of_this_host(address)):
            return True
        return self.listed.knows(place) and self.listed.may_connect(place, address)

    def how_to_allow(self, place: Place) -> str:
        return how_to_allow([str(place)])


def index_hosts(install: Iterable[str], added: str, listed: Sequence[str] = ()) -> IndexHosts:
    """`install`: the install lines. `added`: hosts, with or without a port, separated by commas.
    `listed`: entries of phases.environment.network."""
    variables, files = uv_program.registry_settings()
    texts = {mount.target.rpartition("/")[2]: mount.source for mount in files}
    configured = [*_of_uv(variables, texts), *_of_pip(variables, texts)]
    defaults = [url for url in configured if url in PUBLIC_INDEX]
    named = [_place(url) for url in defaults]
    if any(_NPM.search(line) for line in install):
        own = process_environment.foreign("NPM_CONFIG_REGISTRY") or process_environment.foreign(
            "npm_config_registry"
        )
        configured += [own] if own else []
        named += [] if own else [_place(url) for url in PUBLIC_NPM]
    given = [_added(one) for one in added.replace(",", " ").split()]
    places = {_place(url) for url in configured if url not in PUBLIC_INDEX}
    named += [Place(FILES_OF[place.host], 443) for place in places if place.host in FILES_OF]
    return IndexHosts(
        frozenset(places), frozenset((*named, *given)), AllowList.of(listed, BUILD_NETWORK)
    )


def _of_uv(variables: Mapping[str, str], files: Mapping[str, Path]) -> list[str]:
    given = _urls(
        value for name, value in variables.items()
        if name.upper().startswith(("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS"))
        and name.upper() != "UV_INDEX_URL"
    )  # fmt: skip
    default = _urls(variables.get(name, "") for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"))
    tables = _toml(files["uv.toml"]) if "uv.toml" in files else {}
    for table in (tables, tables.get("pip", {})):
        default += _urls([str(table.get("index-url", ""))])
        given += _urls(str(table.get(key, "")) for key in _KEYS[1:])
    for index in tables.get("index", []):
        (default if index.get("default") else given).extend(_urls([str(index.get("url", ""))]))
    return [*(default or PUBLIC_INDEX), *given]


def _of_pip(variables: Mapping[str, str], files: Mapping[str, Path]) -> list[str]:
    given = _urls(variables.get(name, "") for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"))
    default = _urls([variables.get("PIP_INDEX_URL", "")])
    for path in (path for name, path in files.items() if name.startswith("pip")):
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(path.read_text())
        for section in parser.sections():
            default += _urls([parser.get(section, _KEYS[0], fallback="")])
            given += _urls(parser.get(section, key, fallback="") for key in _KEYS[1:])
    return [*(default or PUBLIC_INDEX), *given]


def _toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def _urls(texts: Iterable[str]) -> list[str]:
    return [url for text in texts for url in _URL.findall(text)]


def _place(url: str) -> Place:
    parts = urlsplit(url)
    return Place((parts.hostname or "").rstrip("."), parts.port or PORTS[parts.scheme])


def _added(name: str) -> Place:
    host, colon, port = name.lower().rpartition(":")
    return Place(host, int(port)) if colon and port.isdigit() else Place(name.lower(), 0)


def how_to_allow(places: Sequence[str]) -> str:
    """The sentence that tells the user how to allow the hosts."""
    hosts = sorted({place.removesuffix(":443").removesuffix(":80") for place in places})
    more = f" and {len(hosts) - SHOWN} more" if len(hosts) > SHOWN else ""
    return (
        "builds can reach only the package index, but this one asked for "
        f"{', '.join(hosts[:SHOWN])}{more}. To allow this, set {SETTING}={','.join(hosts[:SHOWN])}, "
        f"or list it in {BUILD_NETWORK}"
    )
