"""Names of every variant, as dotted paths: a new one is one file and one line here.

Strings only, so that importing this costs nothing and the rooms do not import each other.
"""

import importlib
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from perdure.errors import ConfigurationError

SANDBOXES = {
    "apptainer": "perdure.sandboxes.apptainer:ApptainerProvider",
    "bubblewrap": "perdure.sandboxes.bubblewrap:BubblewrapProvider",
    "daytona": "perdure.sandboxes.daytona:DaytonaProvider",
    "docker": "perdure.sandboxes.docker:DockerProvider",
    "e2b": "perdure.sandboxes.e2b:E2BProvider",
    "kubernetes": "perdure.sandboxes.kubernetes:KubernetesProvider",
    "local": "perdure.sandboxes.local:LocalProvider",
    "podman": "perdure.sandboxes.podman:PodmanProvider",
}

AGENTS = {
    "claude_code": "perdure.agents.claude_code:ClaudeCode",
    "codex": "perdure.agents.codex:Codex",
    "mini_swe_agent": "perdure.agents.mini_swe_agent:MiniSweAgent",
    "nop": "perdure.agents.nop:Nop",
    "opencode": "perdure.agents.opencode:Opencode",
    "openhands": "perdure.agents.openhands:Openhands",
    "oracle": "perdure.agents.oracle:Oracle",
    "qwen_code": "perdure.agents.qwen_code:QwenCode",
}

GRADERS = {
    "eval_cmd": "perdure.graders.eval_cmd:EvalCmdGrader",
    "swebench": "perdure.graders.swebench:SwebenchGrader",
}


def path_of(kind: str, table: dict[str, str], name: str) -> str:
    """The dotted path of a name, which need not be importable here.

    Raises: ConfigurationError listing the known names.
    """
    path = table.get(name, name)
    if ":" not in path:
        known = ", ".join(sorted(table))
        raise ConfigurationError(
            f"unknown {kind} {name!r}: use one of {known}, or a dotted path package.module:Name"
        )
    return path


def load(kind: str, table: dict[str, str], name: str) -> Any:
    """The object that `name` stands for: a registered name, or a dotted path `package.module:Name`.

    Raises:
        ConfigurationError: the name is unknown (the message lists the known ones), or the dotted
            path cannot be imported.
    """
    path = path_of(kind, table, name)
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        where = "" if path == name else f" from {path!r}"
        raise ConfigurationError(f"cannot load {kind} {name!r}{where}: {_why(error)}") from error


def _why(error: ImportError | AttributeError) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; PYTHONPATH must lead to it, also that of the stack or the workers"
    return str(error)


def remember_sandboxes(home: Path, name: str) -> None:
    """Note that this home uses provider `name`, where the table does not name it anyway."""
    if name not in SANDBOXES:
        folder = home / "providers"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / quote(name, safe="")).touch()


def sandboxes_of(home: Path) -> list[str]:
    """Every provider that may have sandboxes of this home: the known ones, and those it ever used."""
    folder = home / "providers"
    used = [unquote(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    return [*SANDBOXES, *sorted(used)]
