"""Reads the rules for signals: which words in the added lines of a patch deserve a look."""

import re
import tomllib
from importlib.resources import files
from pathlib import Path

from perdure.errors import ConfigurationError

VARIABLE = "PERDURE_GRADING__SIGNALS_FILE"
LONGEST = 2000
"""Characters of a pattern."""

SignalRules = dict[str, re.Pattern[bytes]]
"""Name -> pattern."""


def read_signal_rules(file: Path | None) -> SignalRules:
    """The rules in `file`; without one, those that Perdure ships. Raises: ConfigurationError."""
    shipped = files("perdure.graders.diff") / "signal_rules.toml"
    try:
        found = tomllib.loads((file or shipped).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{VARIABLE}: {file} cannot be read: {error}") from error
    return {
        name: _compiled(pattern, f"{VARIABLE}: {file}: {name}") for name, pattern in found.items()
    }


def _compiled(pattern: object, where: str) -> re.Pattern[bytes]:
    if not isinstance(pattern, str) or len(pattern) > LONGEST:
        raise ConfigurationError(f"{where}: write a pattern of at most {LONGEST} characters")
    try:
        compiled = re.compile(pattern.encode())
    except (re.error, OverflowError) as error:
        raise ConfigurationError(f"{where}: not a regular expression: {error}") from error
    if compiled.match(b""):
        raise ConfigurationError(f"{where}: the pattern matches the empty text, so every line")
    return compiled
