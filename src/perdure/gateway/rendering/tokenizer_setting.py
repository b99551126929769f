"""Checks what PERDURE_ENGINE__TOKENIZER names. Imports little, so that a command can refuse a wrong value
before a gateway starts."""

from pathlib import Path

from perdure.errors import ConfigurationError

PACKAGED = "qwen3"


def folder_of(name: str) -> Path | None:
    """A folder that holds tokenizer.json; None for the packaged tokenizer.

    Raises: ConfigurationError naming the setting and what it accepts.
    """
    if name == PACKAGED:
        return None
    folder = Path(name)
    if not (folder / "tokenizer.json").exists():
        raise ConfigurationError(
            f"PERDURE_ENGINE__TOKENIZER is {name!r}: use {PACKAGED!r} or a folder that holds tokenizer.json"
        )
    return folder
