"""Checks the name of a tokenizer. Imports little, so that a command can refuse a wrong value before it
starts a gateway."""

from pathlib import Path

from perdure.errors import ConfigurationError

SETTING = "PERDURE_ENGINE__TOKENIZER"
PACKAGED = "qwen3"
UNREAD = ("tiktoken.model", "tekken.json")
"""Tokenizer files that some folders of Kimi and Mistral have instead of tokenizer.json."""


def folder_of(name: str, option: str = SETTING) -> Path | None:
    """The folder that has tokenizer.json; None for the packaged tokenizer.

    `option`: where the user gave `name`. Raises: ConfigurationError, which names the option and what it
    accepts.
    """
    if name == PACKAGED:
        return None
    folder = Path(name)
    if not (folder / "tokenizer.json").exists():
        held = next((one for one in UNREAD if (folder / one).exists()), "")
        only = f", a folder with {held}, which Perdure does not read" if held else ""
        raise ConfigurationError(
            f"{option} is {name!r}{only}: use {PACKAGED!r} or a folder that has tokenizer.json"
        )
    return folder
