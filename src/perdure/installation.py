"""This copy of Perdure: its version, where it keeps the service's code, and the command that adds a
package to it."""

import functools
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]
"""The root of the checkout, if this copy is in one."""


def service_folder() -> Path:
    """The folder with `workers`, `workflows`, `activities` and `datasets`: the root of a checkout, or
    a folder inside an installed package. Service processes have it on their PYTHONPATH."""
    return ROOT if (ROOT / "workers" / "__main__.py").is_file() else PACKAGE / "service"


@functools.cache
def version() -> str:
    """The package's version, with the commit if this copy is in a checkout or came from one.

    Example: 0.1.0+3badb38417a8-dirty
    """
    try:
        found = metadata.version("perdure")
    except metadata.PackageNotFoundError:
        return "unknown"
    commit = (
        _checked_out_commit() or _installed_from().get("vcs_info", {}).get("commit_id", "")[:12]
    )
    return f"{found}+{commit}" if commit else found


def _checked_out_commit() -> str:
    if not (ROOT / ".git").exists():
        return ""
    argv = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def command_for_extra(*extras: str) -> str:
    """The command that adds extras: `uv sync` in a checkout, otherwise pip with this copy's
    source."""
    if _is_checkout() and Path(sys.prefix) == ROOT / ".venv":
        project = () if Path.cwd() == ROOT else ("--project", str(ROOT))
        words = [_uv() or "uv", "sync", *project, "--frozen", "--inexact"]
        return shlex.join([*words, *(word for name in extras for word in ("--extra", name))])
    wanted = f"perdure[{','.join(extras)}]"
    if _is_checkout():
        return command_for_packages("-e", f"{ROOT}[{','.join(extras)}]")
    source = _source()
    return command_for_packages(f"{wanted} @ {source}" if source else wanted)


def command_for_packages(*requirements: str) -> str:
    """The command that adds packages from an index to this environment."""
    if importlib.util.find_spec("pip") is not None:
        return shlex.join([sys.executable, "-m", "pip", "install", *requirements])
    words = [_uv() or "uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*words, *requirements])


def _is_checkout() -> bool:
    return (ROOT / "pyproject.toml").is_file() and (ROOT / "uv.lock").is_file()


def _uv() -> str:
    """uv on PATH, in this environment, or where `make setup` puts it; empty if there is none."""
    if shutil.which("uv"):
        return "uv"
    found = (Path(sys.prefix) / "bin" / "uv", ROOT / ".uv" / "bin" / "uv")
    return next((str(one) for one in found if one.is_file()), "")


def _source() -> str:
    """The URL of the wheel or archive that this copy was installed from; empty if from an index."""
    return str(_installed_from().get("url", ""))


def _installed_from() -> dict[str, Any]:
    """pip's record of the URL; empty if there is none."""
    try:
        told = metadata.distribution("perdure").read_text("direct_url.json")
        found: dict[str, Any] = json.loads(told or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return {}
    return found
