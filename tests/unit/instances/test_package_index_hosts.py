"""The hosts that a build may reach, read from this host's configuration of pip, uv and npm."""

import re
from pathlib import Path

import pytest

from perdure.instances import uv_program
from perdure.instances.package_index_hosts import (
    IndexHosts,
    how_to_allow,
    index_hosts,
)
from perdure.sandboxes.host.host_addresses import Place, place_of
from perdure.settings import process_environment

PYPI = [Place("pypi.org", 443), Place("files.pythonhosted.org", 443)]


@pytest.fixture(autouse=True)
def plain_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host whose tools have no configuration."""
    for name in process_environment.matching(re.compile("(UV|PIP|NPM)_", re.IGNORECASE)):
        monkeypatch.delenv(name)
    monkeypatch.setattr(uv_program, "CONFIG_FILES", {"UV_CONFIG_FILE": (), "PIP_CONFIG_FILE": ()})


def known(hosts: IndexHosts, *names: str) -> list[bool]:
    return [hosts.knows(place) for name in names if (place := place_of(name))]


def test_without_configuration_it_is_pypi() -> None:
    """Only PyPI's hosts for pages and files, on their own ports; not npm's."""
    hosts = index_hosts(("pip install x",), "")

    assert all(map(hosts.knows, PYPI))
    others = ("pypi.org:80", "pypi.org:22", "pypi.org.evil.example:443", "registry.npmjs.org:443")
    assert not any(known(hosts, *others))


@pytest.mark.parametrize(
    ("variables", "reached"),
    [
        ({"PIP_INDEX_URL": "http://10.1.2.3:3141/root"}, "10.1.2.3:3141"),
        ({"PIP_EXTRA_INDEX_URL": "https://a.example/s https://b.example/s"}, "b.example:443"),
        ({"UV_DEFAULT_INDEX": "corp=https://u:p@corp.example:8443/simple"}, "corp.example:8443"),
        ({"UV_INDEX": "x=https://x.example/simple"}, "x.example:443"),
        ({"UV_FIND_LINKS": "/wheels,https://links.example/"}, "links.example:443"),
    ],
)
def test_variables_of_pip_and_uv_count(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], reached: str
) -> None:
    """A configured index is allowed on its port, whatever its address; its neighbors are not."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    hosts = index_hosts((), "")
    place = place_of(reached)
    assert place is not None

    assert hosts.knows(place)
    assert hosts.may_connect(place, "127.0.0.1")
    assert not hosts.knows(Place(place.host, 7233))


def test_an_index_that_replaces_pypi_for_both_tools_closes_pypi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Builds reach PyPI only while at least one tool uses it."""
    monkeypatch.setenv("PIP_INDEX_URL", "https://corp.example/simple")
    still = index_hosts((), "")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://corp.example/simple")
    closed = index_hosts((), "")

    assert ([*map(still.knows, PYPI)], [*map(closed.knows, PYPI)]) == ([True] * 2, [False] * 2)


def test_files_of_pip_and_uv_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tables, lists and multi-line values are supported."""
    (tmp_path / "uv.toml").write_text(
        'extra-index-url = ["https://one.example/s"]\n[[index]]\nname = "two"\n'
        'url = "https://two.example/s"\ndefault = true\n[pip]\nfind-links = ["https://l.example"]\n'
    )
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://three.example/s\nextra-index-url =\n  https://four.example/s\n"
        "  file:///srv/simple\n"
    )
    files = {"UV_CONFIG_FILE": tmp_path / "uv.toml", "PIP_CONFIG_FILE": tmp_path / "pip.conf"}
    monkeypatch.setattr(
        uv_program, "CONFIG_FILES", {name: (str(path),) for name, path in files.items()}
    )
    hosts = index_hosts((), "")

    names = ("one.example", "two.example", "three.example", "four.example", "l.example")
    assert all(known(hosts, *names))
    assert not any(map(hosts.knows, PYPI))


def test_pypi_by_name_brings_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that names PyPI itself also allows its host for files."""
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"):
        monkeypatch.setenv(name, "https://pypi.org/simple/")

    assert all(map(index_hosts((), "").knows, PYPI))


@pytest.mark.parametrize("line", ["npm ci", "cd ui && yarn install", "npx tsc", "corepack pnpm i"])
def test_rows_that_install_npm_packages_reach_its_registry(line: str) -> None:
    """Only such rows may reach the npm registry."""
    assert known(index_hosts((line,), ""), "registry.npmjs.org") == [True]
    assert known(index_hosts(("pip install npmlib",), ""), "registry.npmjs.org") == [False]


def test_the_setting_adds_hosts_but_no_way_back_to_this_host() -> None:
    """An added name is refused if it resolves to this host or to a link-local address."""
    hosts = index_hosts((), "GitHub.com, files.example:8443")
    github = Place("github.com", 443)

    assert known(hosts, "github.com", "github.com:80", "files.example:8443") == [True] * 3
    assert known(hosts, "github.com:22", "files.example") == [False] * 2
    assert hosts.may_connect(github, "198.51.100.7")
    for address in (
        "127.0.0.1",
        "::1",
        "0.0.0.0",
        "169.254.169.254",
        "fe80::1%eth0",
        "::ffff:127.0.0.1",
    ):
        assert not hosts.may_connect(github, address), address


@pytest.mark.parametrize("text", ["", ":443", "a:b", "a:99999", "u@h:443", "h/x:443"])
def test_what_is_no_address_is_none(text: str) -> None:
    """A request may name only a host and a port."""
    assert place_of(text) is None


def test_the_message_names_host_and_setting_once() -> None:
    """The setting can be pasted; the message stays short if a build asked for many hosts."""
    said = how_to_allow([f"h{n}.example:443" for n in range(30)])

    assert "PERDURE_SANDBOX__BUILD_HOSTS=h0.example,h1.example" in said
    assert "and 26 more" in said


def test_a_builds_own_list_adds_to_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches listed hosts and the index. Only an entry that names a private address opens it."""
    hosts = index_hosts((), "", ("*.debian.org", "git.lan:8443", "10.1.0.0/16:8443"))
    debian, lan = Place("deb.debian.org", 80), Place("git.lan", 8443)

    assert known(hosts, "pypi.org", "deb.debian.org", "debian.org") == [True, True, False]
    assert [hosts.may_connect(debian, one) for one in ("198.51.100.7", "10.1.0.1")] == [True, False]
    assert [hosts.may_connect(lan, one) for one in ("10.1.0.1", "10.2.0.1")] == [True, False]
    assert not hosts.may_connect(lan, "127.0.0.1")
