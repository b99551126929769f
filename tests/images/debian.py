"""A root folder of Debian packages, under every image of this suite; built once and kept."""

import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PACKAGES = (
    "ca-certificates", "git", "patch", "python-is-python3", "python3", "python3-cryptography",
    "python3-dateutil", "python3-jinja2", "python3-mock", "python3-packaging", "python3-pytest",
    "python3-resolvelib", "python3-setuptools", "python3-simplejson", "python3-tz", "python3-venv",
    "python3-yaml",
)  # fmt: skip
SUITE = "bookworm"
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*")


def why_not() -> str:
    """Empty, or what is missing to make it."""
    if shutil.which("mmdebstrap") is None:
        return "mmdebstrap is not installed (Debian: apt-get install mmdebstrap)"
    return ""


def archive(folder: Path, packages: Sequence[str] = PACKAGES) -> Path:
    """A tar of Debian's packages, from the archives that apt uses here."""
    named = hashlib.sha256(repr((SUITE, packages, LEFT_OUT)).encode()).hexdigest()[:12]
    path = folder / f"debian-{named}.tar"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"draft-{path.name}"
        options = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
        include = f"--include={','.join(packages)}"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", include, *options, SUITE]
        subprocess.run([*command, str(draft)], check=True)
        draft.rename(path)
    return path
