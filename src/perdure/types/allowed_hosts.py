"""Entries of a sandbox's allow-list: a host name, the names below a domain, or addresses."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

Addresses = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

WEB_PORTS = (80, 443)
"""The ports of an entry that names none."""
FORM = "write a host (pypi.org), a wildcard (*.example.com) or a CIDR (10.1.0.0/16), each with or without :PORT"
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,62})(\.[a-z0-9_][a-z0-9_-]{0,62})*")
_NUMBER = re.compile(r"(.*\.)?(\d+|0x[0-9a-f]*)")
"""Names that resolvers read as addresses: `127.1`, `2130706433`."""


@dataclass(frozen=True)
class AllowedHost:
    """One entry. Either `name` or `addresses` is set.

    Example: allowed_host("*.example.com:8443") -> AllowedHost("example.com", True, None, 8443)
    """

    name: str
    """Lowercase, without a final dot."""
    is_wildcard: bool
    """The entry means every name below `name`, and not `name` itself."""
    addresses: Addresses | None
    port: int | None
    """None: WEB_PORTS."""

    def __str__(self) -> str:
        host = f"*.{self.name}" if self.is_wildcard else self.name
        if self.addresses is not None:
            alone = self.addresses.num_addresses == 1
            host = str(self.addresses.network_address if alone else self.addresses)
            host = f"[{host}]" if ":" in host and self.port else host
        return f"{host}:{self.port}" if self.port else host

    def has_port(self, port: int) -> bool:
        return port == self.port if self.port else port in WEB_PORTS

    def has_name(self, name: str) -> bool:
        below = self.is_wildcard and name.endswith(f".{self.name}")
        return below or (bool(name) and not self.is_wildcard and name == self.name)

    def has_address(self, address: Address) -> bool:
        return self.addresses is not None and address in self.addresses

    def covers(self, other: "AllowedHost") -> bool:
        """Whether it allows everything that `other` allows."""
        ports = WEB_PORTS if other.port is None else (other.port,)
        if not all(map(self.has_port, ports)):
            return False
        if self.addresses is not None and other.addresses is not None:
            one, two = self.addresses, other.addresses
            return one.version == two.version and two.subnet_of(one)  # type: ignore[arg-type]  # equal versions
        same = self.name == other.name and self.is_wildcard == other.is_wildcard
        return bool(other.name) and (same or self.has_name(other.name))


def allowed_host(text: str) -> AllowedHost:
    """Raises: ValueError naming the entry and the form."""
    host, port = _split(text.strip().lower())
    try:
        return AllowedHost("", False, ipaddress.ip_network(host.strip("[]")), port)
    except ValueError as error:
        if "has host bits set" in str(error):
            network = ipaddress.ip_network(host.strip("[]"), strict=False)
            raise ValueError(f"{text!r} is not the start of its network: write {network}") from None
    is_wildcard = host.startswith("*.")
    name = host.removeprefix("*.").removesuffix(".")
    if not _NAME.fullmatch(name) or _NUMBER.fullmatch(name) or len(name) > 253:
        raise ValueError(f"{text!r} is not an entry of an allow-list: {FORM}")
    return AllowedHost(name, is_wildcard, None, port)


def allowed_hosts(entries: Iterable[str]) -> tuple[str, ...]:
    """The entries in one spelling and order, each once. Raises: ValueError for a wrong entry."""
    return tuple(sorted({str(allowed_host(entry)) for entry in entries}))


def is_host_name(name: str) -> bool:
    """Whether a lowercase text has the form of a host name."""
    return len(name) <= 253 and _NAME.fullmatch(name) is not None


def _split(text: str) -> tuple[str, int | None]:
    """`host:443` -> ("host", 443). An IPv6 address with a port is in brackets."""
    host, colon, port = text.rpartition(":")
    bare_address = ":" in host and not host.endswith("]")
    if not colon or bare_address or not host:
        return text, None
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        return text, None  # no name has a colon, so this is refused
    return host, int(port)
