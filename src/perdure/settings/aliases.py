"""Variables of the users' documents: which setting or field each one stands for, or why it has none.

An alias of a setting ranks between our own variable and `perdure.toml`. An alias of a request's field
is a default where the request is made: what the request says itself always wins.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from perdure.settings import environment


class Alias(NamedTuple):
    """`stands_for`: the path of a setting, or a field of a RolloutRequest."""

    name: str
    kind: Literal["setting", "field"]
    stands_for: str
    agent: str = ""
    """The only agent that the variable speaks of; empty = all."""
    is_seconds: bool = False
    form: str = "{}"
    """The value as the setting wants it."""


ALIASES = (
    Alias("SWE_HOST_CC_TARBALL", "setting", "agents.claude_code_tarball"),
    Alias("SLIME_AGENT_CC_TARBALL", "setting", "agents.claude_code_tarball"),
    Alias("SWE_HOST_NODE_TARBALL", "setting", "agents.node_tarball"),
    Alias("SLIME_AGENT_NODE_TARBALL", "setting", "agents.node_tarball"),
    Alias("SWE_SANDBOX_METADATA_FILE", "setting", "e2b.metadata_file"),
    Alias("SLIME_AGENT_SANDBOX_METADATA_FILE", "setting", "e2b.metadata_file"),
    Alias("SWE_SANDBOX_IMAGE_METADATA_KEY", "setting", "e2b.metadata_image_key"),
    Alias("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "setting", "e2b.metadata_image_key"),
    Alias("SHIM_BIND_HOST", "setting", "gateway.host"),
    Alias("ADAPTER_BIND_HOST", "setting", "gateway.host"),
    Alias("SHIM_PORT", "setting", "gateway.port"),
    Alias("ADAPTER_PORT", "setting", "gateway.port"),
    Alias("SWE_BOOT_CONCURRENCY", "setting", "slots.boot"),
    Alias("SWE_TIME_BUDGET_SEC", "field", "agent_budget_s", is_seconds=True),
    Alias("SWE_AGENT_TIME_BUDGET_SEC", "field", "agent_budget_s", is_seconds=True),
    Alias("SWE_EVAL_TIMEOUT_SEC", "field", "grade_timeout_s", is_seconds=True),
    Alias("SWE_CC_PROMPT", "field", "agent_options.prompt_template", agent="claude_code"),
    Alias("SWE_CLAUDE_EXTRA_ARGS", "field", "agent_options.extra_args", agent="claude_code"),
)
"""If several stand for one thing, the first that is set counts."""
FIELDS = tuple(one for one in ALIASES if one.kind == "field")
SETTINGS = tuple(one for one in ALIASES if one.kind == "setting")


def given_for(path: str, variables: Mapping[str, str] | None = None) -> Alias | None:
    """The alias that gives this setting its value, if one is set."""
    found = environment.variables() if variables is None else variables
    ours = (one for one in SETTINGS if one.stands_for == path)
    return next((one for one in ours if found.get(one.name)), None)


def settings_given() -> dict[str, str]:
    """Path of each setting that an alias gives a value -> the value."""
    paths = {one.stands_for for one in SETTINGS}
    given = {path: alias for path in paths if (alias := given_for(path)) is not None}
    return {
        path: alias.form.format(environment.variables()[alias.name])
        for path, alias in given.items()
    }
