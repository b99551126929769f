"""The hosts that the agent or the tests may reach: a list of names, wildcards and addresses."""

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.sandboxes.host.host_addresses import (
    PRIVATE,
    Place,
    address_of,
    is_of_this_host,
    is_private,
)
from perdure.types.allowed_hosts import AllowedHost, allowed_host, is_host_name


@dataclass(frozen=True)
class AllowList:
    """A name must be in the list before it is resolved, so lookups carry no data out.

    A private address, also one to which a listed name resolves, needs an entry that names it: a CIDR
    of private addresses only. An address of this host or its link needs an entry of its own.
    """

    entries: tuple[AllowedHost, ...]
    field: str
    """The request's field that holds the list, for messages."""

    @classmethod
    def of(cls, entries: Sequence[str], field: str) -> "AllowList":
        return cls(tuple(map(allowed_host, entries)), field)

    def knows(self, place: Place) -> bool:
        address = address_of(place.host)
        if address is None and not is_host_name(place.host):
            return False
        return any(
            entry.has_port(place.port)
            and (entry.has_name(place.host) if address is None else entry.has_address(address))
            for entry in self.entries
        )

    def may_connect(self, place: Place, address: str) -> bool:
        found = address_of(address)
        if found is None:
            return False
        naming = [
            entry.addresses
            for entry in self.entries
            if entry.addresses is not None
            and entry.has_port(place.port)
            and entry.has_address(found)
        ]
        if is_of_this_host(address):
            return any(network.num_addresses == 1 for network in naming)
        if not is_private(found):
            return True
        return any(
            network.version == private.version and network.subnet_of(private)  # type: ignore[arg-type]  # equal versions
            for network in naming
            for private in PRIVATE
        )

    def how_to_allow(self, place: Place) -> str:
        return f"{self.field} does not list {place}"
