"""Makes a tiny random model of another architecture: `python make_random.py QWEN3 FOLDER FAMILY [SEED]`.

It runs in vLLM's own environment; nothing in Perdure imports it. QWEN3 is the folder that
`infra/setup/vllm` made. Its tokenizer is copied, so that only the architecture differs.
"""

# mypy: ignore-errors

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
LATENT = {
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
}
ARCHITECTURES = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen3_moe": ("qwen3_moe", {**MIXTURE, "num_experts": 4}),
    "glm4": ("glm4", {"attention_bias": True}),
    "glm4_moe": (
        "glm4_moe",
        {
            **MIXTURE,
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**MIXTURE, **SIGMOID, **LATENT, "n_group": 4, "topk_group": 2}),
    "kimi_k2": ("deepseek_v3", {**MIXTURE, **SIGMOID, **LATENT, "n_group": 1, "topk_group": 1}),
    "minimax_m2": (
        "minimax_m2",
        {
            **SIGMOID,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rotary_dim": 32,
            "use_routing_bias": True,
        },
    ),
    "nemotron": ("nemotron", {}),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 2,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128},
    ),
}
"""By family: transformers' name, and parameters in addition to the common sizes."""
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
    architecture, own = ARCHITECTURES[name]
    config = AutoConfig.for_model(architecture, **(SIZES | own))
    model = AutoModelForCausalLM.from_config(config)
    for field, bias in model.named_buffers():
        if field.endswith("e_score_correction_bias"):
            bias.normal_(std=0.1)  # zero would not show whether it is added
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in qwen3.glob("*token*"):
        shutil.copy(file, folder)


if __name__ == "__main__":
    main()
