"""The root folder of sandboxes that run this host's own programs: which programs it contains, and
its /etc."""

import hashlib
import os
import shutil
import sys
from pathlib import Path

from perdure.sandboxes.agent_user import HOME, USER_ID
from perdure.sandboxes.base import Mount

LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders of / that are links into /usr on most systems."""
PACKAGE_STORES = ("/nix/store", "/nix/var/nix/profiles", "/gnu/store", "/var/guix/profiles")
"""Programs of Nix and Guix, and the links of their profiles. The folders above them hold the sockets of
their daemons, which build on the host and download: no sandbox may see these."""
FOLDERS = ("dev", "etc", "home", "opt", "proc", "run", "sys", "tmp", "usr", "var")

ETC = {
    "group": f"root:x:0:\nagent:x:{USER_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 sandbox\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "resolv.conf": "",
    "passwd": (
        "root:x:0:0:root:/root:/usr/sbin/nologin\n"
        f"agent:x:{USER_ID}:{USER_ID}:agent:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
}
"""Files of /etc that we write. Of the host's /etc, a sandbox sees only ETC_OF_HOST."""

ETC_OF_HOST = (
    "alternatives", "ca-certificates", "crypto-policies", "debian_version", "gai.conf",
    "java-11-openjdk", "java-17-openjdk", "java-21-openjdk", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "magic", "mime.types", "os-release", "perl", "pki/ca-trust",
    "pki/tls/certs", "protocols", "python3", f"python3.{sys.version_info.minor}", "redhat-release",
    "services", "ssl/certs", "ssl/openssl.cnf", "timezone",
)  # fmt: skip
PAGES = shutil.ignore_patterns("*.gz")
"""Links to manual pages in /etc/alternatives: often half of all files, and no program needs them."""


def host_programs() -> list[Mount]:
    """The host's /usr and package stores, and this Python where it is installed outside of them."""
    folders = ["/usr", *(folder for folder in PACKAGE_STORES if os.path.isdir(folder))]
    for prefix in (sys.base_prefix, os.path.realpath(sys.base_prefix)):
        if not any(f"{prefix}/".startswith(f"{folder}/") for folder in folders):
            folders.append(prefix)
    return [Mount(Path(folder), folder) for folder in folders]


def write_skeleton(folder: Path) -> None:
    """Empty folders to mount the host's programs on, and the links of a merged /usr."""
    for name in FOLDERS:
        (folder / name).mkdir(mode=0o755, parents=True)
    (folder / "var/tmp").symlink_to("/tmp")
    for name in LINKED:
        path = Path("/", name)
        if path.is_symlink():
            (folder / name).symlink_to(os.readlink(path))


def etc_digest() -> str:
    """A digest of the part of the host's /etc that sandboxes see."""
    names = [Path("/etc", name) for name in ETC_OF_HOST]
    state = [(str(path), path.stat().st_mtime_ns) for path in names if path.exists()]
    return hashlib.sha256(repr((state, ETC)).encode()).hexdigest()[:16]


def write_etc(folder: Path) -> None:
    folder.mkdir(mode=0o755, parents=True)
    for name in ETC_OF_HOST:
        path, copy = Path("/etc", name), folder / name
        copy.parent.mkdir(exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, copy, symlinks=True, ignore_dangling_symlinks=True, ignore=PAGES)
        elif path.exists():
            shutil.copy2(path, copy, follow_symlinks=name != "localtime")
    for name, text in ETC.items():
        (folder / name).write_text(text)
