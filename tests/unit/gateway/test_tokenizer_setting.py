"""Which tokenizers are refused before a gateway starts."""

import re
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.gateway.rendering.tokenizer_setting import folder_of


@pytest.mark.parametrize("held", ["tiktoken.model", "tekken.json"])
def test_a_folder_in_another_form_is_refused_by_that_form(tmp_path: Path, held: str) -> None:
    """As Kimi and Mistral publish some models: the folder is right, only its tokenizer is not read."""
    (tmp_path / held).touch()
    said = f"{str(tmp_path)!r}, a folder with {held}, which Perdure does not read: use 'qwen3' or"

    with pytest.raises(ConfigurationError, match=re.escape(said)):
        folder_of(str(tmp_path))


def test_a_folder_with_both_forms_is_taken(tmp_path: Path) -> None:
    for name in ("tekken.json", "tokenizer.json"):
        (tmp_path / name).touch()

    assert folder_of(str(tmp_path)) == tmp_path
