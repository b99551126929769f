"""A host and port that a sandbox asks a proxy for, and which addresses are this host's or private."""

import ipaddress
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from perdure.types.allowed_hosts import Address, Addresses

PORTS = {"http": 80, "https": 443}
PRIVATE: tuple[Addresses, ...] = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
            *("172.16.0.0/12", "192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/3"),
            *("::/8", "2001::/32", "2002::/16", "fc00::/7", "fe80::/9", "ff00::/8"),
        ),
    )
)
"""Addresses that are not a public host's. `::/8`, 2001::/32 and 2002::/16 can contain an IPv4
address."""


class Place(NamedTuple):
    """A lowercase host name and a port. Port 0 means the ports of HTTP and HTTPS."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def place_of(authority: str, scheme: str = "https") -> Place | None:
    """`Host:443` -> Place("host", 443); None if it is not a host."""
    try:
        parts = urlsplit(f"//{authority}")
        port = parts.port or PORTS[scheme]
    except ValueError:
        return None
    host = (parts.hostname or "").rstrip(".")
    return Place(host, port) if host and parts.username is None and not parts.path else None


def address_of(host: str) -> Address | None:
    """The address that a text is; an IPv4 address that IPv6 maps is IPv4. None for one with a zone."""
    try:
        found = ipaddress.ip_address(host if "%" not in host else "")
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def is_private(address: Address) -> bool:
    return any(address in network for network in PRIVATE)


def is_of_this_host(address: str) -> bool:
    """The address is this host's own, or link-local, such as a metadata service's."""
    found = address_of(address)
    if found is None:  # only link-local addresses have zones
        return True
    special = (found.is_loopback, found.is_link_local, found.is_unspecified, found.is_multicast)
    return any(special) or _is_own(str(found))


def _is_own(address: str) -> bool:
    """Test by binding a socket: only this host's own addresses can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
