"""Packages of an npm registry are pinned, verified, and unpacked inside their folder."""

import asyncio
import base64
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from perdure.agents import npm_config, npm_packages
from perdure.errors import AgentError, MissingDependency
from perdure.settings import settings_loader


def tarball(*members: tarfile.TarInfo, content: bytes = b"#!/bin/sh\n") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in members:
            member.size = len(content) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, mode: int = 0o644, **fields: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.mode = mode
    for field, value in fields.items():
        setattr(made, field, value)
    return made


class Registry:
    """A registry on a loopback port that serves one tarball at one path."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.statuses: list[int] = []
        self.seen: list[tuple[str, str | None]] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry.seen.append((self.path, self.headers.get("authorization")))
                status = registry.statuses.pop(0) if registry.statuses else 200
                self.send_response(status)
                self.end_headers()
                if status == 200:
                    self.wfile.write(registry.content)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


TOOL = tarball(member("package/bin/tool", 0o755), member("package/readme"))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    """The only registry in this test's npm configuration; its lock pins `TOOL`."""
    registry = Registry(TOOL)
    locks = tmp_path / "locks"
    locks.mkdir()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(TOOL).digest()).decode()
    entry = {"package": "@tests/tool", "version": "1.2.3", "integrity": integrity}
    (locks / "tool.json").write_text(json.dumps({"any": entry}))
    monkeypatch.setattr(npm_packages, "LOCKS", locks)
    monkeypatch.setattr("time.sleep", lambda _: None)
    for name in ("registry", "userconfig", "globalconfig"):
        monkeypatch.delenv(f"npm_config_{name}", raising=False)
        monkeypatch.delenv(f"NPM_CONFIG_{name.upper()}", raising=False)
    rc = tmp_path / "npmrc"
    rc.write_text(
        f"# a mirror\nregistry = http://{registry.host}/npm\n//{registry.host}/npm/:_authToken=k\n"
    )
    monkeypatch.setenv("NPM_CONFIG_USERCONFIG", str(rc))
    monkeypatch.setenv("NPM_CONFIG_GLOBALCONFIG", "/dev/null")
    yield registry
    registry.close()


def test_a_package_comes_from_the_users_registry(registry: Registry, tmp_path: Path) -> None:
    """The user's npm configuration gives registry and key; executable bits are kept."""
    folder = asyncio.run(npm_packages.installed(tmp_path / "tools", "tool"))

    assert registry.seen == [("/npm/@tests/tool/-/tool-1.2.3.tgz", "Bearer k")]
    assert (folder / "bin/tool").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in folder.parent.iterdir() if path.is_dir()) == [folder.name]


def test_a_package_is_fetched_once(registry: Registry, tmp_path: Path) -> None:
    """After that the cache answers, without the registry."""
    first = asyncio.run(npm_packages.installed(tmp_path, "tool"))
    second = asyncio.run(npm_packages.installed(tmp_path, "tool"))

    assert (first, len(registry.seen)) == (second, 1)


def test_other_bytes_than_the_locked_ones_are_refused(registry: Registry, tmp_path: Path) -> None:
    """A tarball with another checksum is not unpacked and leaves no tool."""
    registry.content = TOOL + b"x"
    with pytest.raises(AgentError, match=r"@tests/tool@1.2.3: wrong sha512"):
        asyncio.run(npm_packages.installed(tmp_path / "tools", "tool"))

    assert not list((tmp_path / "tools").glob("tool-????????????????"))


def test_a_busy_registry_is_asked_again(registry: Registry, tmp_path: Path) -> None:
    """After a 503 and a 429, the package is downloaded."""
    registry.statuses = [503, 429]
    folder = asyncio.run(npm_packages.installed(tmp_path, "tool"))

    assert (folder / "readme").is_file()


def test_a_refusal_is_final_and_says_what_to_do(registry: Registry, tmp_path: Path) -> None:
    """A 404 is not retried; the error names the package, the host and the fix."""
    registry.statuses = [404]
    with pytest.raises(AgentError, match=r"cannot download @tests/tool@1.2.3 from 127.*tarball"):
        asyncio.run(npm_packages.installed(tmp_path, "tool"))

    assert len(registry.seen) == 1


def test_a_named_tarball_needs_no_registry(registry: Registry, tmp_path: Path) -> None:
    """A tarball on the host is used instead of the registry."""
    (tmp_path / "own.tgz").write_bytes(tarball(member("node-v22/bin/node", 0o755)))
    folder = asyncio.run(npm_packages.installed(tmp_path, "tool", tmp_path / "own.tgz"))

    assert (folder / "bin/node").is_file()
    assert registry.seen == []


def test_an_absent_tarball_is_named(registry: Registry, tmp_path: Path) -> None:
    """The error names the variable and the path."""
    with pytest.raises(
        MissingDependency, match=r"PERDURE_AGENTS__TOOL_TARBALL=/nowhere: no such file"
    ):
        asyncio.run(npm_packages.installed(tmp_path, "tool", Path("/nowhere")))


def test_an_unknown_machine_is_named(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a platform without a package names the fix."""
    monkeypatch.setattr("platform.machine", lambda: "riscv64")

    with pytest.raises(MissingDependency, match=r"codex has no package for riscv64.*CODEX_TARBALL"):
        npm_packages.locked("codex", {"linux-x64": {}})


@pytest.mark.parametrize("name", ["package/../../evil", "/etc/evil", "../evil", "evil", "a/.."])
def test_a_tarball_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    """A member that points elsewhere is refused by its name; no file is written outside."""
    (tmp_path / "evil.tgz").write_bytes(tarball(member(name)))
    with pytest.raises(AgentError, match="not inside"):
        npm_packages.unpack(tmp_path / "evil.tgz", tmp_path / "deep" / "folder")

    assert not list(tmp_path.rglob("evil"))


def test_links_are_left_out(tmp_path: Path) -> None:
    """A link out of the folder, and a file written through it, never reach the outside."""
    link = member("package/out", type=tarfile.SYMTYPE, linkname=str(tmp_path))
    (tmp_path / "links.tgz").write_bytes(tarball(link, member("package/out/evil")))
    npm_packages.unpack(tmp_path / "links.tgz", tmp_path / "folder")

    assert not (tmp_path / "evil").exists()
    assert (tmp_path / "folder/out/evil").is_file()


@pytest.mark.parametrize(
    "content",
    [b"", b"no tarball", TOOL[:40], TOOL[:60] + bytes(20) + TOOL[80:], tarball()],
    ids=["nothing", "text", "half", "torn", "empty"],
)
def test_a_torn_tarball_is_an_error_of_ours(tmp_path: Path, content: bytes) -> None:
    """For any damage, the error names the tarball."""
    (tmp_path / "torn.tgz").write_bytes(content)

    with pytest.raises(AgentError, match=r"torn\.tgz"):
        npm_packages.unpack(tmp_path / "torn.tgz", tmp_path / "folder")


def test_configuration_in_npms_order(tmp_path: Path) -> None:
    """The environment wins over the user's file; scopes have registries; ${NAME} expands."""
    rc = tmp_path / ".npmrc"
    rc.write_text(
        "registry=http://file/\n@corp:registry=https://corp/x\n//corp/x/:_authToken=${KEY}\n"
    )
    environment = {"HOME": str(tmp_path), "npm_config_registry": "http://env", "KEY": "secret"}
    config = npm_config.load(environment)

    assert config.registry("tool") == "http://env/"
    assert config.registry("@corp/tool") == "https://corp/x/"
    assert config.authorization("https://corp/x/@corp/tool/-/tool-1.tgz") == "Bearer secret"
    assert config.authorization("https://corp.example/x/tool") is None


@pytest.mark.parametrize(
    "lock", sorted(npm_packages.LOCKS.glob("*.json")), ids=lambda lock: lock.stem
)
def test_every_lock_can_be_replaced_by_a_tarball(lock: Path) -> None:
    """A setting names a tarball for each lock, and each lock pins sha512."""
    entries = [entry for entry in json.loads(lock.read_text()).values() if isinstance(entry, dict)]

    assert f"agents.{lock.stem}_tarball" in settings_loader.fields()
    assert entries
    assert all(entry["integrity"].startswith("sha512-") for entry in entries)


def test_the_public_registry_is_the_default() -> None:
    """Without configuration, packages come from npm's public registry."""
    assert npm_config.Npmrc({}).registry("@corp/tool") == npm_config.PUBLIC
