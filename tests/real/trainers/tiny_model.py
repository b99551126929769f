"""A tokenizer and a configuration that trainers load where they ask for a model.

The tokenizer is Qwen3's, as the gateways': they refuse a trainer that has another.
"""

# mypy: ignore-errors

import sys
from pathlib import Path

from transformers import Qwen3Config

# Not by way of `tests`: a trainer installs a package of that name.
sys.path.append(str(Path(__file__).parents[1] / "vllm"))

import make_model


def save(folder: Path) -> str:
    tokenizer = make_model.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=3,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    ).save_pretrained(folder)
    return str(folder)
