"""The policy of a scripted engine: picks the script of a conversation and gives its next turn as tokens.

Turns are written as Qwen3 would sample them. `scripted_engine` serves them and simulates faults.
"""

import contextlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.gateway.rendering.tokenizers import Tokenizer

DEFAULT_TURNS: tuple[dict[str, Any], ...] = ({"content": "Nothing to do."},)
KEPT_OPENINGS = 512


class Scripts:
    """Picks the script of a conversation, and its next turn."""

    def __init__(self, scripts: Mapping[str, Any]) -> None:
        """Raises: ValueError, which names the problem in the script."""
        self._scripts = [(_text(s, "match"), _turns(s)) for s in scripts.get("scripts", ())]
        self._default = _turns(scripts.get("default", {"turns": list(DEFAULT_TURNS)}))

    def turn(self, text: str, index: int) -> dict[str, Any]:
        """The `index`-th turn of the first script whose `match` occurs in the text. The last turn
        repeats."""
        turns = next((turns for match, turns in self._scripts if match in text), self._default)
        return turns[min(index, len(turns) - 1)]


def _text(script: Mapping[str, Any], name: str) -> str:
    if not isinstance(script.get(name), str) or not script[name]:
        raise ValueError(f"a script needs {name!r}, a non-empty string")
    return str(script[name])


def _turns(script: Mapping[str, Any]) -> list[dict[str, Any]]:
    turns = script.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError("a script needs 'turns', a non-empty list")
    return turns


class Policy:
    """Applies scripts to token ids. It decodes only the part of a prompt that it needs, and caches it."""

    def __init__(self, tokenizer: Tokenizer, scripts: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.scripts = Scripts(scripts)
        self._start, self._end = (
            tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")
        )
        self._assistant = tokenizer.encode_plain("assistant")[0]
        self._openings: dict[bytes, str] = {}
        self._completions: dict[int, list[int]] = {}

    def complete(self, prompt_ids: list[int]) -> list[int]:
        """The full completion, including a part that the prompt may already end with. Shape [C]."""
        turns, opening = 0, len(prompt_ids)
        position = -1
        with contextlib.suppress(ValueError, IndexError):
            while True:
                position = prompt_ids.index(self._start, position + 1)
                if prompt_ids[position + 1] == self._assistant:
                    opening = min(opening, position)
                    turns += 1
        turn = self.scripts.turn(self._opening(prompt_ids[:opening]), max(turns - 1, 0))
        if id(turn) not in self._completions:
            self._completions[id(turn)] = self.tokens(turn)
        return self._completions[id(turn)]

    def until(self, token_ids: list[int], stops: Sequence[str]) -> list[int]:
        """The ids up to the one that completes a stop text; all ids if no stop text occurs."""
        for end in range(1, len(token_ids) + 1):
            text = self._tokenizer.decode(token_ids[:end])
            if any(stop in text for stop in stops):
                return token_ids[:end]
        return token_ids

    def begun(self, prompt_ids: list[int], whole: list[int]) -> int:
        """How many leading tokens of the completion the prompt already ends with, as after a resume."""
        end = len(prompt_ids)
        with contextlib.suppress(ValueError):
            start = end - 1 - prompt_ids[::-1].index(self._start)
            most = min(end - start - 2, len(whole) - 1)
            return next(n for n in range(most, -1, -1) if prompt_ids[end - n :] == whole[:n])
        return 0

    def _opening(self, token_ids: list[int]) -> str:
        """The text before the first answer. All turns and samples of an instance share it."""
        key = array("i", token_ids).tobytes()
        if key not in self._openings:
            if len(self._openings) >= KEPT_OPENINGS:
                self._openings.clear()
            self._openings[key] = self._tokenizer.decode(token_ids)
        return self._openings[key]

    def tokens(self, turn: Mapping[str, Any]) -> list[int]:
        """A scripted turn as Qwen3 would sample it, with the closing token."""
        if "raw" in turn:
            return [*self._encode_raw(turn["raw"]), self._end]
        parts = []
        if turn.get("reasoning"):
            parts.append(f"<think>\n{turn['reasoning']}\n</think>\n\n")
        parts.append(turn.get("content", ""))
        for call in turn.get("tool_calls", ()):
            body = json.dumps({"name": call["name"], "arguments": call["arguments"]})
            parts.append(f"{chr(10) if parts[-1] else ''}<tool_call>\n{body}\n</tool_call>")
        return [*self._encode_raw("".join(parts)), self._end]

    def _encode_raw(self, text: str) -> list[int]:
        """Encode text with its control tokens: the scripts are our own, so we trust them."""
        ids: list[int] = []
        while text:
            markers = ("<think>", "</think>", "<tool_call>", "</tool_call>")
            found = [(at, marker) for marker in markers if (at := text.find(marker)) != -1]
            at, marker = min(found, default=(len(text), ""))
            ids += self._tokenizer.encode_plain(text[:at])
            if marker:
                ids.append(self._tokenizer.convert_tokens_to_ids(marker))
            text = text[at + len(marker) :]
        return ids
