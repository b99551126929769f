"""A tokenizer and a configuration that trainers load where they ask for a model; none of it is used."""

# mypy: ignore-errors

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config


def save(folder: Path) -> str:
    words = {"<pad>": 0, "<unk>": 1, "<eos>": 2}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    ).save_pretrained(folder)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=3,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    ).save_pretrained(folder)
    return str(folder)
