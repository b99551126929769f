"""Unsupported tokenizers are refused before a gateway starts."""

import re
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.gateway.rendering.tokenizer_setting import folder_of


@pytest.mark.parametrize("held", ["tiktoken.model", "tekken.json"])
def test_a_folder_with_another_tokenizer_file_is_refused_by_its_name(
    tmp_path: Path, held: str
) -> None:
    """Kimi and Mistral publish such folders: the folder is correct, but its tokenizer cannot be
    read."""
    (tmp_path / held).touch()
    said = f"{str(tmp_path)!r}, a folder with {held}, which Perdure does not read: use 'qwen3' or"

    with pytest.raises(ConfigurationError, match=re.escape(said)):
        folder_of(str(tmp_path))


def test_a_folder_with_both_files_is_accepted(tmp_path: Path) -> None:
    for name in ("tekken.json", "tokenizer.json"):
        (tmp_path / name).touch()

    assert folder_of(str(tmp_path)) == tmp_path
