"""How a sandbox reaches the gateway depends on its provider; an error names the fix."""

from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.sandboxes.base import SandboxProvider, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.sandboxes.providers.local import LocalProvider
from perdure.sandboxes.relay.gateway_route import Reach, choose_reach, open_from_inside, unreachable
from perdure.sandboxes.relay.relay_process import LARGEST_LINE, Lines
from perdure.settings.settings_tree import Settings

ROUTABLE = "http://10.1.2.3:18001"
UNROUTABLE = [
    "http://127.0.0.1:18001",
    "http://localhost:18001",
    "http://gateway.localhost",
    "http://0.0.0.0:18001",
    "http://[::1]:18001",
    "http://[::]:1",
    "http://[::ffff:127.0.0.1]:1",
    "unix:///run/gateway.sock",
    "/run/gateway.sock",
]


class Remote(LocalProvider):
    """A provider of sandboxes on other hosts, as far as the choice can tell."""

    name = "remote"
    isolated = True
    host_bound = False


@pytest.mark.parametrize(
    ("kind", "url", "expected"),
    [
        (BubblewrapProvider, ROUTABLE, "socket"),
        (LocalProvider, UNROUTABLE[0], "socket"),
        (Remote, ROUTABLE, "url"),
        (Remote, UNROUTABLE[0], "stdio"),
    ],
)
def test_auto_takes_the_nearest_way(
    tmp_path: Path, kind: type[SandboxProvider], url: str, expected: Reach
) -> None:
    """The socket on this host, otherwise a routable URL, otherwise a relay."""
    assert choose_reach("auto", kind(Settings(home=tmp_path)), url) == expected  # type: ignore[call-arg]


@pytest.mark.parametrize("url", UNROUTABLE)
def test_an_address_of_this_host_alone_is_refused(tmp_path: Path, url: str) -> None:
    """A sandbox elsewhere cannot open a loopback, unspecified or socket address: the error names
    field and fix."""
    with pytest.raises(ConfigurationError, match=r"gateway.url .* PERDURE_GATEWAY__URL"):
        choose_reach("url", Remote(Settings(home=tmp_path)), url)


def test_a_socket_that_the_sandbox_cannot_see_is_refused(tmp_path: Path) -> None:
    """A socket needs a sandbox on this host: the error says so."""
    with pytest.raises(
        ConfigurationError, match=r"gateway.reach = socket: .*PERDURE_GATEWAY__REACH"
    ):
        choose_reach("socket", Remote(Settings(home=tmp_path)), ROUTABLE)


async def test_an_address_that_does_not_open_inside_is_named(tmp_path: Path) -> None:
    """The check runs inside a sandbox without a network, before any agent starts."""
    provider = BubblewrapProvider(Settings(home=tmp_path))
    if missing := provider.check():
        pytest.skip(missing[0])
    async with await provider.create(SandboxSpec("/testbed"), "p-reach-1") as sandbox:
        reason = await open_from_inside(sandbox, ROUTABLE)

        assert "unreachable" in reason
        assert f"{ROUTABLE} cannot be opened inside" in str(unreachable(sandbox, ROUTABLE, reason))


def test_endless_lines_are_dropped_and_the_next_is_read() -> None:
    """A line without end uses bounded memory, and later lines are read."""
    lines = Lines()
    for _ in range(64):
        lines.feed(b"x" * LARGEST_LINE)

    assert len(lines._rest) <= LARGEST_LINE
    assert lines.feed(b'\n{"done":"a"}\n') == [{"done": "a"}]
