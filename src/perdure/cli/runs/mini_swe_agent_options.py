"""Translates the options and the YAML of mini-swe-agent 2.x's `swebench` into those of `perdure eval`."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from perdure.cli.commands.option_types import duration
from perdure.client.temporal_server import configured_address
from perdure.engines.reported_model import named_engine
from perdure.errors import ConfigurationError
from perdure.settings import process_environment
from perdure.settings.settings_tree import Settings
from perdure.settings.variable_aliases import NOT_APPLICABLE
from perdure.stack import stack_state
from perdure.types import RolloutRequest, Sampling

SUBSETS = {
    "full": "princeton-nlp/SWE-Bench",
    "verified": "princeton-nlp/SWE-Bench_Verified",
    "lite": "princeton-nlp/SWE-Bench_Lite",
    "multimodal": "princeton-nlp/SWE-Bench_Multimodal",
    "multilingual": "swe-bench/SWE-Bench_Multilingual",
    "smith": "SWE-bench/SWE-smith",
    "rebench": "nebius/SWE-rebench",
}
"""mini-swe-agent's names of datasets on the hub."""
OWN_SETS = frozenset(["verified", "lite", "multimodal", "multilingual"])
"""Subsets whose split `test` is a set of `perdure eval`."""
SANDBOXES = {
    "docker": "docker",
    "podman": "podman",
    "singularity": "apptainer",
    "bubblewrap": "bubblewrap",
    "swerex_docker": "docker",
    "swerex_modal": "modal",
}
HOSTED = {"openai": "https://api.openai.com/v1", "anthropic": "https://api.anthropic.com"}
"""Providers in a model's name whose endpoint Perdure calls itself."""
PASSED = "passed"
KEYS = {
    "agent.system_template": PASSED,
    "agent.instance_template": PASSED,
    "agent.step_limit": "--set agent_options.step_limit={}",
    "agent.cost_limit": "note: needs prices: use --max-rollout-cost with --prices FILE",
    "agent.wall_time_limit_seconds": PASSED,
    "agent.max_consecutive_format_errors": PASSED,
    "environment.cwd": "note: each row names its workdir",
    "environment.timeout": PASSED,
    "environment.env": PASSED,
    "environment.pull_timeout": "PERDURE_SANDBOX__PULL_TIMEOUT_S={}",
    "environment.interpreter": "note: commands run in the sandbox's `sh`",
    "environment.forward_env": "refused: sandboxes get no variable of the host; use environment.env",
    "environment.run_args": "refused: use `--set phases.agent...` for limits and the network",
    "model.litellm_model_registry": "refused: use --prices FILE",
    "model.cost_tracking": "note: costs come from --prices FILE",
    "model.observation_template": PASSED,
    "model.format_error_template": PASSED,
    "model.set_cache_control": "refused: the gateway sends no cache marks; leave it out",
    "run.env_startup_command": "refused: use a dataset's recipe or the row's image",
    "model.model_kwargs.max_tokens": "--set sampling.max_tokens_per_turn={}",
    "model.model_kwargs.api_base": "refused: set HOSTED_VLLM_API_BASE or OPENAI_BASE_URL",
    "model.model_kwargs.api_key": "refused: set OPENAI_API_KEY",
    **{
        f"model.model_kwargs.{name}": f"--set sampling.{name}={{}}"
        for name in Sampling.model_fields
        if name in {"temperature", "top_p", "top_k", "min_p", "stop", "seed"} or "penalty" in name
    },
}
"""Keys of the YAML: how each one becomes an option or a variable, is passed on to the agent, has no
effect (a note says why), or is refused. Other keys of `model_kwargs` are passed on."""

REGISTRY = "LITELLM_MODEL_REGISTRY_PATH"
HANDLED = frozenset(
    [
        *("model.model_name", "model.model_class"),
        *("environment.executable", "environment.environment_class"),
        "environment.container_timeout",
    ]
)
"""Keys that stand for an option of the command line, or set the agent's budget."""


@dataclass
class Translation:
    """A command line of `perdure eval` and the variables that it needs."""

    source: str
    provider: str = ""
    """Of the model's name."""
    options: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    agent_args: list[str] = field(default_factory=list)

    @property
    def argv(self) -> list[str]:
        passed = f"agent_options.extra_args={json.dumps(self.agent_args)}"
        return [self.source, *self.options, *(["--set", passed] if self.agent_args else [])]

    @property
    def text(self) -> str:
        """What to type instead."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(["perdure", "eval", *self.argv])])

    def apply_config(self, key: str, value: Any) -> None:
        """Honour one key of the YAML. Raises: ConfigurationError, which names the key."""
        is_kwarg = key.startswith("model.model_kwargs.")
        rule = KEYS.get(key, PASSED if is_kwarg else "refused: Perdure does not know this key")
        text = value if isinstance(value, str) else json.dumps(value)
        if rule.startswith("refused: "):
            raise ConfigurationError(f"--config: {key}: {rule.removeprefix('refused: ')}")
        if rule.startswith("note: "):
            self.notes.append(f"{key} has no effect: {rule.removeprefix('note: ')}")
        elif rule == PASSED:
            self.agent_args += ["-c", f"{key}={json.dumps(value)}"]
        elif rule.startswith("--"):
            if key.endswith(".stop") and isinstance(value, str):
                text = json.dumps([value])
            option, _, assignment = rule.partition(" ")
            self.options += [option, assignment.format(text)]
        else:
            self.variables[rule.partition("=")[0]] = text
        if key == "agent.instance_template":  # it has the instructions that ours would repeat
            self.options += ["--set", "agent_options.prompt_template={problem_statement}"]


def translate(
    *,
    subset: str,
    split: str,
    slice_: str,
    filter_: str,
    shuffle: bool,
    workers: int,
    model: str | None,
    model_class: str | None,
    config: Sequence[str],
    environment_class: str | None,
) -> Translation:
    """Raises: ConfigurationError, which names the option or key that Perdure cannot honour."""
    if shuffle:
        raise ConfigurationError("--shuffle: rows keep their order; choose some by --include GLOB")
    found = Translation(source_of(subset, split))
    configured = read_configs(config)
    name = model or configured.get("model.model_name")
    if name:
        name_model(found, str(name))
    found.options += ["-c", str(workers)]
    for glob in globs_of(filter_):
        found.options += ["-i", glob]
    if slice_:
        found.options += ["-l", limit_of(slice_)]
    chosen = model_class or configured.get("model.model_class") or "litellm"
    if chosen not in {"litellm", "minisweagent.models.litellm_model.LitellmModel"}:
        raise ConfigurationError(
            f"--model-class {chosen}: only litellm; for less CPU: --set agent_options.client=direct"
        )
    isolation = environment_class or configured.get("environment.environment_class")
    if (program := configured.get("environment.executable")) and isolation in (None, "docker"):
        found.options += ["--sandbox", sandbox_of(str(program), "--config: environment.executable")]
    elif isolation:
        found.options += ["--sandbox", sandbox_of(str(isolation), "--environment-class")]
    if seconds := agent_seconds(configured):
        found.options += ["--budget", f"{seconds:g}"]
    for key, value in configured.items():
        if key not in HANDLED:
            found.apply_config(key, value)
    if process_environment.variables().get(REGISTRY):
        found.notes.append(f"{REGISTRY} has no effect: {NOT_APPLICABLE[REGISTRY]}")
    return found


def name_endpoint(found: Translation, settings: Settings) -> None:
    """Add the provider's own address if nothing names an engine and no stack is up.

    Raises: ConfigurationError for hosted_vllm without an address.
    """
    elsewhere = configured_address(settings) is not None or stack_state.is_locked(settings)
    if elsewhere or named_engine(settings).url:
        return
    if found.provider == "hosted_vllm":
        raise ConfigurationError("--model hosted_vllm/...: set HOSTED_VLLM_API_BASE to its address")
    if found.provider in HOSTED:
        found.variables[f"{found.provider.upper()}_BASE_URL"] = HOSTED[found.provider]


def source_of(subset: str, split: str) -> str:
    """SOURCE of `perdure eval`. Only datasets of the hub have a split."""
    if Path(subset).exists() or (subset not in SUBSETS and "/" not in subset):
        return subset
    if subset in OWN_SETS and split == "test":
        return subset
    return f"{SUBSETS.get(subset, subset)}:{split}"


def globs_of(pattern: str) -> list[str]:
    """Globs for a simple regular expression from the start of an id. Raises: ConfigurationError."""
    globs = []
    for one in filter(None, pattern.split("|")):
        start = one.removeprefix("^")
        if not re.fullmatch(r"(?:[\w-]|\\\.|\.\*|\.)*\$?", start):
            raise ConfigurationError(
                f"--filter {pattern}: use globs instead: --include 'django__*'"
            )
        glob = re.sub(
            r"\\\.|\.\*|\.", lambda m: {r"\.": ".", ".*": "*", ".": "?"}[m[0]], start.rstrip("$")
        )
        globs.append(glob if start.endswith(("$", ".*")) else f"{glob}*")
    return globs


def limit_of(text: str) -> str:
    """N of the slice `0:N`. Raises: ConfigurationError."""
    first = re.fullmatch(r"0?:([1-9]\d*)", text)
    if not first:
        raise ConfigurationError(
            f"--slice {text}: only 0:N can be used; choose others by --include"
        )
    return first[1]


def sandbox_of(name: str, key: str) -> str:
    """A provider of sandboxes. Raises: ConfigurationError."""
    provider = SANDBOXES.get(name.rpartition("/")[2])
    if provider is None:
        known = ", ".join(SANDBOXES)
        raise ConfigurationError(f"{key} {name}: use one of {known}; `--sandbox` has more")
    return provider


def name_model(found: Translation, model: str) -> None:
    """The model's name without its provider. Raises: ConfigurationError for an unknown provider."""
    provider, slash, name = model.partition("/")
    found.provider = provider if slash else ""
    if not slash or provider in HOSTED:
        found.options += ["--model", name or provider]
    elif provider == "hosted_vllm":
        found.variables["PERDURE_ENGINE__MODEL"] = name
    else:
        raise ConfigurationError(
            f"--model {model}: Perdure calls openai/NAME, anthropic/NAME and hosted_vllm/NAME; for"
            f" another provider set OPENAI_BASE_URL to its address and use openai/{name}"
        )


def read_configs(specs: Sequence[str]) -> dict[str, Any]:
    """The merged values of YAML files and `KEY=VALUE`, one per key of the table.

    Raises: ConfigurationError for a file that is missing or is not YAML.
    """
    merged: dict[str, Any] = {}
    for spec in specs:
        name, equals, value = spec.partition("=")
        merged |= {name: _value(value)} if equals else _flat(_file(spec))
    return merged


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _file(spec: str) -> Mapping[str, Any]:
    path = Path(spec)
    if path.name in {"swebench", "swebench.yaml"} and not path.exists():
        return {}  # mini-swe-agent's own default
    try:
        import yaml
    except ImportError:
        raise ConfigurationError(
            "--config needs PyYAML: pip install 'perdure[instances]'"
        ) from None
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--config {spec}: {error}".splitlines()[0]) from None
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise ConfigurationError(f"--config {spec}: it must have sections, such as `environment:`")
    return found


def _flat(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    flat = {
        f"{name}.{key}": one for name, section in sections.items() for key, one in section.items()
    }
    kwargs = flat.pop("model.model_kwargs", None) or {}
    return flat | {f"model.model_kwargs.{key}": one for key, one in kwargs.items()}


def agent_seconds(configured: Mapping[str, Any]) -> float:
    """The agent's budget: the container's timeout or, without one, a command's timeout that exceeds our
    default budget. 0 keeps the default. Raises: ConfigurationError."""
    lives = configured.get("environment.container_timeout")
    try:
        seconds = duration(str(lives)) if lives else float(configured.get("environment.timeout", 0))
    except (click.BadParameter, TypeError, ValueError) as error:
        raise ConfigurationError(f"--config: a time limit of `environment`: {error}") from None
    default = float(RolloutRequest.model_fields["agent_budget_s"].default)
    return seconds if lives or seconds > default else 0.0
