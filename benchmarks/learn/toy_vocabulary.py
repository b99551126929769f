"""The tiny model's tokenizer and chat template, which a published model ships with its weights.

Each word, number, punctuation mark and space is one token; all other text is bytes. So a name is the same
token wherever it occurs, and a small model can learn to copy it.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks.learn.toy_tasks import NAMES, NUMBERS, OPERATORS

CALL = '\n{"name": "bash", "arguments": {"command": "'
CALLED = '"}}\n'
CONTROL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<|endoftext|>")
END = "<|im_end|>"
PAD = "<|endoftext|>"
PHRASES = (CALL, CALLED, '{"returncode": ', ', "output": "', '\\n"}', '"}')
"""The constant parts of a tool call and its result are one token each."""
WORDS = (
    *("user", "assistant", "tool", "FAILED", "want", "cat", "sed", "echo", "done"),
    *("-i", "s", "v", "a", "b", "cannot", "read", "No", "such", "or", "directory", "can", "t"),
)
TOOL_CALL_PARSER = "hermes"
"""The format of its tool calls. The template does not show the tool's description, so the gateway must be
told the format."""
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson)"
    " + '\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"
)


def write(folder: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = dict.fromkeys((*PHRASES, *WORDS, *NUMBERS, *OPERATORS, *OPERATORS.values(), *NAMES))
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    for text in texts:
        vocabulary.setdefault(_as_letters(text), len(vocabulary))
    made = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    whole = "|".join(_escaped(text) for text in sorted(PHRASES, key=len, reverse=True))
    split = Regex(rf"{whole}|-?[A-Za-z]+|[0-9]+|[^A-Za-z0-9]")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    return made


def _as_letters(text: str) -> str:
    """The text in the form of byte-level BPE: one letter per byte."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        text
    )
    return "".join(piece for piece, _ in pieces)


def _escaped(text: str) -> str:
    return "".join(f"\\x{{{ord(letter):x}}}" for letter in text)
