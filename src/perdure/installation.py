"""Where this copy of Perdure keeps the service's code, and the command that adds a package to it."""

import importlib.util
import json
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[1]
"""The root of the checkout, if this copy is in one."""


def service_folder() -> Path:
    """The folder with `workers`, `workflows`, `activities` and `datasets`: the root of a checkout, or
    a folder inside an installed package. Service processes have it on their PYTHONPATH."""
    return ROOT if (ROOT / "workers" / "__main__.py").is_file() else PACKAGE / "service"


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
    try:
        told = metadata.distribution("perdure").read_text("direct_url.json")
        return str(json.loads(told or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError):
        return ""
