"""A list of hosts: its spelling, what it allows, and which lists cover others."""

import re

import pytest

from perdure.sandboxes.host.allow_list import AllowList
from perdure.sandboxes.host.host_addresses import Place, place_of
from perdure.types.allowed_hosts import allowed_host, allowed_hosts


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("PyPI.org.", "pypi.org"),
        ("*.Example.com:8443", "*.example.com:8443"),
        ("10.1.0.0/16:443", "10.1.0.0/16:443"),
        ("192.0.2.7", "192.0.2.7"),
        ("[2001:db8::/32]:443", "[2001:db8::/32]:443"),
        ("2001:DB8::1", "2001:db8::1"),
    ],
)
def test_an_entry_has_one_spelling(text: str, spelled: str) -> None:
    """So that a run's identity changes only with the list's meaning."""
    assert str(allowed_host(text)) == spelled
    assert allowed_hosts((text, spelled)) == (spelled,)


WRONG = ("", "*", "*.", "a.*.b", "*x.org", "http://a.org", "a.org/x", "a.org:0", "a.org:99999")
NUMBERS = ("127.1", "2130706433", "0x7f000001", "10.0.0.1/8", "*.10.0.0.1")


@pytest.mark.parametrize("text", [*WRONG, *NUMBERS, "a b", "ü.org", "u@a.org", "a..b"])
def test_a_wrong_entry_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        allowed_host(text)


@pytest.mark.parametrize(
    ("entry", "place", "known"),
    [
        ("a.org", "a.org:443", True),
        ("a.org", "a.org:80", True),
        ("a.org", "a.org:8080", False),
        ("a.org:8080", "a.org:8080", True),
        ("a.org:8080", "a.org:443", False),
        ("*.a.org", "x.y.a.org:443", True),
        ("*.a.org", "a.org:443", False),
        ("*.a.org", "xa.org:443", False),
        ("192.0.2.0/24", "192.0.2.9:443", True),
        ("192.0.2.0/24", "192.0.3.9:443", False),
        ("192.0.2.0/24", "[::ffff:192.0.2.9]:443", True),
        ("2001:db8::/32", "[2001:db8:1::2]:443", True),
    ],
)
def test_an_entry_means_its_hosts_and_ports(entry: str, place: str, known: bool) -> None:
    asked = place_of(place)
    assert asked is not None

    assert AllowList.of([entry], "f").knows(asked) is known


@pytest.mark.parametrize(
    ("entry", "address", "may"),
    [
        ("a.org", "198.51.100.7", True),
        ("a.org", "10.1.2.3", False),
        ("10.1.0.0/16", "10.1.2.3", True),
        ("10.1.0.0/16:8443", "10.1.2.3", False),
        ("8.0.0.0/6", "10.1.2.3", False),
        ("0.0.0.0/0", "192.168.0.1", False),
        ("::/0", "fd00::1", False),
        ("fd00::/16", "fd00::1", True),
        ("127.0.0.0/8", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "::ffff:127.0.0.1", True),
        ("169.254.0.0/16", "169.254.169.254", False),
        ("169.254.169.254", "169.254.169.254", True),
        ("::/0", "64:ff9b::7f00:1", False),
        ("::/0", "fe80::1%eth0", False),
    ],
)
def test_private_addresses_need_an_entry_that_names_them(
    entry: str, address: str, may: bool
) -> None:
    """A listed name may lead to a public address, or to a private one that the list also names."""
    assert AllowList.of(["a.org", entry], "f").may_connect(Place("a.org", 443), address) is may


@pytest.mark.parametrize(
    ("one", "other", "covers"),
    [
        ("*.a.org", "x.a.org", True),
        ("*.a.org", "*.x.a.org", True),
        ("*.a.org", "a.org", False),
        ("x.a.org", "*.a.org", False),
        ("a.org", "a.org:443", True),
        ("a.org:443", "a.org", False),
        ("a.org", "a.org:22", False),
        ("10.0.0.0/8", "10.1.0.0/16", True),
        ("10.1.0.0/16", "10.0.0.0/8", False),
        ("0.0.0.0/0", "::/0", False),
        ("0.0.0.0/0", "a.org", False),
    ],
)
def test_a_setting_covers_what_it_allows(one: str, other: str, covers: bool) -> None:
    assert allowed_host(one).covers(allowed_host(other)) is covers
