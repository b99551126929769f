"""The command that installs what is missing, for the way this copy of Perdure is installed.

No index has Perdure: `pip install 'perdure[serving]'` works nowhere.
"""

import importlib.util
import json
import shlex
import shutil
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Of the checkout, if this copy is in one."""


def command_for_extra(*extras: str) -> str:
    """What adds extras of Perdure: `uv sync` in a checkout, else pip with this copy's own source."""
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
    """What adds packages of an index to this environment."""
    if importlib.util.find_spec("pip") is not None:
        return shlex.join([sys.executable, "-m", "pip", "install", *requirements])
    words = [_uv() or "uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*words, *requirements])


def _is_checkout() -> bool:
    return (ROOT / "pyproject.toml").is_file() and (ROOT / "uv.lock").is_file()


def _uv() -> str:
    """On PATH, in this environment, or where `make setup` puts it; empty: there is none."""
    if shutil.which("uv"):
        return "uv"
    found = (Path(sys.prefix) / "bin" / "uv", ROOT / ".uv" / "bin" / "uv")
    return next((str(one) for one in found if one.is_file()), "")


def _source() -> str:
    """The URL of the wheel or archive that this copy was installed from; empty: from an index."""
    try:
        told = metadata.distribution("perdure").read_text("direct_url.json")
        return str(json.loads(told or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError):
        return ""
