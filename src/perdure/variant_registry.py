"""The names of all variants, with dotted paths. A new variant is one file and one line here.

The paths are strings, so that importing this module is cheap and the packages do not import each
other. Handlers that programs register at run time (`perdure.data_source_handlers`) are also kept here.
"""

import difflib
import importlib
from typing import Any

from perdure.errors import ConfigurationError

SANDBOXES = {
    "apptainer": "perdure.sandboxes.providers.apptainer:ApptainerProvider",
    "bubblewrap": "perdure.sandboxes.providers.bubblewrap:BubblewrapProvider",
    "daytona": "perdure.sandboxes.providers.daytona.provider:DaytonaProvider",
    "docker": "perdure.sandboxes.providers.docker.provider:DockerProvider",
    "e2b": "perdure.sandboxes.providers.e2b.provider:E2BProvider",
    "kubernetes": "perdure.sandboxes.providers.kubernetes.provider:KubernetesProvider",
    "local": "perdure.sandboxes.providers.local:LocalProvider",
    "modal": "perdure.sandboxes.providers.modal.provider:ModalProvider",
    "podman": "perdure.sandboxes.providers.podman:PodmanProvider",
}

AGENTS = {
    "acp": "perdure.agents.acp:Acp",
    "aider": "perdure.agents.aider:Aider",
    "base_suite": "perdure.agents.base_suite:BaseSuite",
    "claude_code": "perdure.agents.claude_code:ClaudeCode",
    "codex": "perdure.agents.codex:Codex",
    "gemini_cli": "perdure.agents.gemini_cli:GeminiCli",
    "mini_swe_agent": "perdure.agents.mini_swe_agent:MiniSweAgent",
    "nop": "perdure.agents.nop:Nop",
    "opencode": "perdure.agents.opencode:Opencode",
    "openhands": "perdure.agents.openhands:Openhands",
    "oracle": "perdure.agents.oracle:Oracle",
    "predictions": "perdure.agents.predictions_agent:Predictions",
    "qwen_code": "perdure.agents.qwen_code:QwenCode",
    "r2e_gym": "perdure.agents.r2e_gym:R2eGym",
    "smolagents": "perdure.agents.smolagents:Smolagents",
    "terminus_2": "perdure.agents.terminus_2:Terminus2",
}

GRADERS = {
    "eval_cmd": "perdure.graders.protocols.eval_cmd:EvalCmdGrader",
    "multi_swe": "perdure.graders.protocols.multi_swe:MultiSweGrader",
    "reward_file": "perdure.graders.protocols.reward_file:RewardFileGrader",
    "status_map": "perdure.graders.protocols.status_map:StatusMapGrader",
    "swebench": "perdure.graders.protocols.test_lists:SwebenchGrader",
    "swepro": "perdure.graders.protocols.swepro:SweproGrader",
}

ROWS = {
    "cpython": "perdure.instances.rows.formats.cpython:to_instance",
    "git-history": "perdure.instances.rows.formats.swebench:to_instance",
    "harbor": "perdure.instances.rows.formats.harbor:to_instance",
    "multi-swe-bench": "perdure.instances.rows.formats.multi_swe:to_instance",
    "r2e": "perdure.instances.rows.formats.r2e_gym:to_instance",
    "r2e-gym": "perdure.instances.rows.formats.r2e_gym:to_instance",
    "release-pair": "perdure.instances.rows.formats.swebench:to_instance",
    "scale-swe": "perdure.instances.rows.formats.scale_swe:to_instance",
    "slime": "perdure.instances.rows.formats.slime:to_instance",
    "swe-bench": "perdure.instances.rows.formats.swebench:to_instance",
    "swe-bench-multimodal": "perdure.instances.rows.formats.multimodal:to_instance",
    "swe-bench-pro": "perdure.instances.rows.formats.swe_bench_pro:to_instance",
    "swe-gym": "perdure.instances.rows.formats.swe_gym:to_instance",
    "swe-rebench": "perdure.instances.rows.formats.swe_rebench:to_instance",
    "swe-smith": "perdure.instances.rows.formats.swe_smith:to_instance",
    "swebench": "perdure.instances.rows.formats.swebench:to_instance",
    "swegym": "perdure.instances.rows.formats.swe_gym:to_instance",
    "swesmith": "perdure.instances.rows.formats.swe_smith:to_instance",
}
"""Row readers by `data_source`. `swe-bench` also reads `SWE-bench_Lite` and
`princeton-nlp/SWE-bench_Verified`: see `data_source_named`."""

HANDLERS: dict[str, Any] = {}
"""The handlers that programs have registered, by `data_source`: see `perdure.data_source_handlers`."""


def data_source_named(name: str) -> str | None:
    """The key of HANDLERS or ROWS for a row's `data_source`; None if there is none.

    The name of a registered handler must match exactly. The name of a public dataset may have an
    owner, capitals, underscores and a suffix.
    """
    if name in HANDLERS or name in ROWS:
        return name
    plain = name.rpartition("/")[2].lower().replace("_", "-")
    fits = [key for key in ROWS if plain == key or plain.startswith(f"{key}-")]
    return max(fits, key=len, default=None)


def unknown_data_source(name: str) -> str:
    """An error message that names the closest known data source and says how to add another."""
    known = sorted({*HANDLERS, *ROWS})
    close = difflib.get_close_matches(name.lower().replace("_", "-"), known, n=1)
    nearest = f"did you mean {close[0]!r}?" if close else f"known ones are {', '.join(known)}."
    return (
        f"unknown data_source {name!r}: {nearest} A handler of your own adds one: name its module in "
        "PERDURE_HANDLERS, or its class as package.module:Name"
    )


def path_of(kind: str, table: dict[str, str], name: str) -> str:
    """The dotted path of a name. It need not be importable here.

    Raises: ConfigurationError, which lists the known names.
    """
    path = table.get(name, name)
    if ":" not in path:
        known = ", ".join(sorted(table))
        close = difflib.get_close_matches(name, table, n=1)
        meant = f"did you mean {close[0]!r}? Otherwise" if close else ""
        raise ConfigurationError(
            f"unknown {kind} {name!r}: {f'{meant} ' if meant else ''}use one of {known}, or a dotted path package.module:Name"
        )
    return path


def load(kind: str, table: dict[str, str], name: str) -> Any:
    """The object for `name`, which is a registered name or a dotted path `package.module:Name`.

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
        return f"{error}; PYTHONPATH must include it, also for the stack and the workers"
    return str(error)
