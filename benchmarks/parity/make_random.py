"""A tiny random model of another architecture: `python make_random.py QWEN3 FOLDER ARCHITECTURE [SEED]`.

Runs in vLLM's own environment; nothing in Perdure imports it. QWEN3 is the folder that
`infra/setup/vllm` made: its tokenizer is copied, so that only the architecture differs.
"""

# mypy: ignore-errors

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ARCHITECTURES = {
    "qwen3": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "glm4": {"attention_bias": True},
}
"""transformers' name, and what it needs besides the common sizes. GLM-4.5 is a mixture over glm4."""
SIZES = {
    "vocab_size": 151_936,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 151_645,
    "pad_token_id": 151_643,
}


def main():
    qwen3, folder, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.manual_seed(int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    config = AutoConfig.for_model(name, **SIZES, **ARCHITECTURES[name])
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    for file in qwen3.glob("*token*"):
        shutil.copy(file, folder)


if __name__ == "__main__":
    main()
