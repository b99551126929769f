"""Variables of other systems: the setting or request field that each one sets, or why it sets none.

An alias of a setting ranks between the `PERDURE_*` variable and `perdure.toml`. An alias of a
request's field is a default in the client's process. The request's own value overrides it.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from perdure.settings import process_environment


class Alias(NamedTuple):
    """`stands_for`: the path of a setting, or a field of a RolloutRequest."""

    name: str
    kind: Literal["setting", "field"]
    stands_for: str
    agent: str = ""
    """The only agent to which the variable applies; empty for all."""
    value: Literal["text", "seconds", "dense"] = "text"
    """What the variable holds. `dense`: `0` or nothing, otherwise the reward form `partial`."""


ALIASES = (
    Alias("SWE_HOST_CC_TARBALL", "setting", "agents.claude_code_tarball"),
    Alias("SLIME_AGENT_CC_TARBALL", "setting", "agents.claude_code_tarball"),
    Alias("SWE_HOST_NODE_TARBALL", "setting", "agents.node_tarball"),
    Alias("SLIME_AGENT_NODE_TARBALL", "setting", "agents.node_tarball"),
    Alias("SWE_SANDBOX_METADATA_FILE", "setting", "e2b.metadata_file"),
    Alias("SLIME_AGENT_SANDBOX_METADATA_FILE", "setting", "e2b.metadata_file"),
    Alias("SWE_SANDBOX_IMAGE_METADATA_KEY", "setting", "e2b.metadata_image_key"),
    Alias("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "setting", "e2b.metadata_image_key"),
    Alias("HOSTED_VLLM_API_BASE", "setting", "engine.url"),
    Alias("SHIM_BIND_HOST", "setting", "gateway.host"),
    Alias("ADAPTER_BIND_HOST", "setting", "gateway.host"),
    Alias("SHIM_PORT", "setting", "gateway.port"),
    Alias("ADAPTER_PORT", "setting", "gateway.port"),
    Alias("SWE_BOOT_CONCURRENCY", "setting", "slots.boot"),
    Alias("SWE_TIME_BUDGET_SEC", "field", "agent_budget_s", value="seconds"),
    Alias("SWE_AGENT_TIME_BUDGET_SEC", "field", "agent_budget_s", value="seconds"),
    Alias("SWE_EVAL_TIMEOUT_SEC", "field", "grade_timeout_s", value="seconds"),
    Alias("SWE_REWARD_DENSE", "field", "reward_form", value="dense"),
    Alias("SWE_CC_PROMPT", "field", "agent_options.prompt_template", agent="claude_code"),
    Alias("SWE_CLAUDE_EXTRA_ARGS", "field", "agent_options.extra_args", agent="claude_code"),
)
"""If several aliases set one thing, the first one that has a value counts."""
FIELDS = tuple(one for one in ALIASES if one.kind == "field")
SETTINGS = tuple(one for one in ALIASES if one.kind == "setting")


NOT_APPLICABLE = {
    "SLIME_HEAD_HOST": "a relay needs no address; `PERDURE_GATEWAY__URL` sets one",
    "MASTER_ADDR": "a relay needs no address; `PERDURE_GATEWAY__URL` sets one",
    "ADAPTER_PUBLIC_HOST": "a relay needs no address; `PERDURE_GATEWAY__URL` sets one",
    "SANDBOX_METADATA_FILE": "slime passes it on as `SWE_SANDBOX_METADATA_FILE`",
    "SWE_AGENT": "use `--agent`; slime's hook reads it",
    "SWE_BOOT_RETRIES": "Temporal retries each stage",
    "SWE_ROLLOUT_GUARD_SEC": "each stage has its own time limit",
    "SWE_EVAL_PROTOCOL": "the instance names its grader",
    "SWE_TRAIN_PROTOCOL": "the instance names its grader",
    "SWE_MAX_CONTEXT_LEN": "use `sampling.max_context_tokens` of a request",
    "SWE_CLAUDE_CDN": "sandboxes download no agent; use `PERDURE_AGENTS__CLAUDE_CODE_TARBALL`",
    "SLIME_AGENT_CC_EXTRA_ARGS": "use `SWE_CLAUDE_EXTRA_ARGS`",
    "SLIME_AGENT_CC_EXTRA_ENVS": "use `agent_options.extra_env` of a request",
    "SLIME_FORK_MERGE_MAX_RESPONSE_TOKENS": "`perdure export --segments slime` uses 1024",
    "LITELLM_MODEL_REGISTRY_PATH": "use `--prices FILE`",
    "TT_DAYTONA_AUTO_STOP_MIN": "use `PERDURE_SANDBOX__TTL_S`",
    "TT_DAYTONA_AUTO_DELETE_MIN": "a stopped sandbox is deleted at once",
    "CONFIG": "TorchTitan's launcher passes it as `--config`",
    "EXP_TAG": "slime's launcher names its folder after it; use `run_id`",
    "PROMPT_DATA": "TorchTitan's recipes read it; slime's launcher passes it as `--prompt-data`",
    "HF_CHECKPOINT": "slime's launcher passes it as `--hf-checkpoint`",
    "REF_MODEL_PATH": "slime's launcher passes it as `--ref-load`",
    "HF_ASSETS_PATH": "TorchTitan's recipes read it as `hf_assets_path`",
    "OH_RUNTIME_SINGULARITY_IMAGE_REPO": "a row's image may be a .sif file; "
    "`PERDURE_SANDBOX__IMAGE_MIRROR` replaces registries",
    "SANDBOX_ISOLATE_NETWORK": "sandboxes have no network, unless the request opens one",
    "SANDBOX_RUN_AS_FAKEROOT": "each provider maps users as its isolation requires",
}
"""Variables of the same systems that set no setting and no field of a request, each with the reason."""


def find_set_alias(path: str, variables: Mapping[str, str] | None = None) -> Alias | None:
    """The alias that gives this setting its value, if one is set."""
    found = process_environment.variables() if variables is None else variables
    ours = (one for one in SETTINGS if one.stands_for == path)
    return next((one for one in ours if found.get(one.name)), None)


def read_alias_settings() -> dict[str, str]:
    """Path -> value of the settings that aliases set."""
    paths = {one.stands_for for one in SETTINGS}
    given = {path: alias for path in paths if (alias := find_set_alias(path)) is not None}
    return {path: process_environment.variables()[alias.name] for path, alias in given.items()}
