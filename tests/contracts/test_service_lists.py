"""Lists of hosts that services keep themselves: what arrives at each, and what is refused before."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from modal_proto import api_pb2

from perdure.errors import ConfigurationError
from perdure.sandboxes.base import Network
from tests.service_harness import DAYTONA, E2B, ID, MODAL, SPEC, Bench, Service

HOSTS = ("*.example.com", "10.1.0.0/16", "198.51.100.7", "pypi.org")
LISTED = replace(SPEC, network=Network.LISTED, allowed_hosts=HOSTS)
NAMES, ADDRESSES = ["*.example.com", "pypi.org"], ["10.1.0.0/16", "198.51.100.7/32"]

Sent = Callable[[Mapping[str, Any]], Any]


def sent_to_e2b(record: Mapping[str, Any]) -> Any:
    return record["internet"], record["network"]


def sent_to_daytona(record: Mapping[str, Any]) -> Any:
    asked = record["asked"]
    return tuple(map(asked.get, ("networkBlockAll", "networkAllowList", "domainAllowList")))


def sent_to_modal(record: Mapping[str, Any]) -> Any:
    return record["network"], record["cidrs"], record["domains"]


@pytest.fixture(params=[E2B, DAYTONA, MODAL], ids=lambda service: service.name)
def service(request: pytest.FixtureRequest) -> Service:
    found: Service = request.param
    return found


async def test_the_list_arrives(bench: Bench, service: Service) -> None:
    """Names, wildcards and addresses in the service's own form; all else is closed there."""
    sent, wanted = {
        "e2b": (
            sent_to_e2b,
            (False, {"allowOut": [*NAMES, *ADDRESSES], "denyOut": ["0.0.0.0/0"]}),
        ),
        "daytona": (sent_to_daytona, (None, ",".join(ADDRESSES), ",".join(NAMES))),
        "modal": (sent_to_modal, (api_pb2.NetworkAccess.ALLOWLIST, ADDRESSES, NAMES)),
    }[service.name]
    async with bench.box(LISTED) as box:
        (record,) = bench.server.sandboxes.all()

        assert (sent(record), box.proxy_socket) == (wanted, None)


async def test_a_list_of_names_allows_no_address(bench: Bench, service: Service) -> None:
    sent, wanted = {
        "e2b": (sent_to_e2b, (False, {"allowOut": ["pypi.org"], "denyOut": ["0.0.0.0/0"]})),
        "daytona": (sent_to_daytona, (None, None, "pypi.org")),
        "modal": (sent_to_modal, (api_pb2.NetworkAccess.ALLOWLIST, [], ["pypi.org"])),
    }[service.name]
    async with bench.box(replace(LISTED, allowed_hosts=("pypi.org",))):
        (record,) = bench.server.sandboxes.all()

        assert sent(record) == wanted


@pytest.mark.parametrize(
    ("entry", "fix"),
    [("pypi.org:8443", r"limits no ports: write pypi\.org"), ("fd00::/8", "IPv4 addresses only")],
)
async def test_what_the_service_cannot_limit_is_refused(bench: Bench, entry: str, fix: str) -> None:
    """An entry that it would widen or drop stops the create, with the fix."""
    with pytest.raises(ConfigurationError, match=fix):
        await bench.provider.create(replace(LISTED, allowed_hosts=(entry,)), ID)

    assert bench.live == []
