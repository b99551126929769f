"""Makes, scores and saves the tiny model in vLLM's format, and makes the canaries that prove a version.

Everything is float32, also in the engine, so that recorded logprobs equal the trainer's within rounding.
"""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.learn.toy_vocabulary import END, PAD
from benchmarks.learn.training_rows import Sample
from perdure.engines.weights.weight_update import WeightCanary

CONTEXT = 512
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
CANARIES = 6
TOLERANCE = 0.02


def new_model(tokenizer: Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """A random Qwen3 of about 0.2 million parameters. Embeddings are not tied, because vLLM on CPU keeps
    a tied output layer when weights are updated."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    return Qwen3ForCausalLM(config).float()


def load(folder: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save(model: Qwen3ForCausalLM, folder: Path, tokenizer: Path) -> Path:
    """Write the checkpoint in the form of a published model, atomically."""
    draft = folder.with_name(f".{folder.name}")
    shutil.rmtree(draft, ignore_errors=True)
    model.save_pretrained(draft)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, draft / name)
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    return folder


def batched(samples: Sequence[Sample]) -> tuple[torch.Tensor, ...]:
    """ids, mask, recorded logprobs [B, L], temperatures [B, 1], advantages [B, 1]; padded at the end."""
    length = max(len(sample.ids) for sample in samples)
    ids = torch.zeros(len(samples), length, dtype=torch.long)
    mask = torch.zeros(len(samples), length)
    logprobs = torch.zeros(len(samples), length)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        mask[row, : len(sample.ids)] = torch.tensor(sample.mask, dtype=torch.float)
        logprobs[row, : len(sample.ids)] = torch.tensor(sample.logprobs)
    temperatures = torch.tensor([[sample.temperature] for sample in samples])
    advantages = torch.tensor([[sample.advantage] for sample in samples])
    return ids, mask, logprobs, temperatures, advantages


def logprobs_of(
    model: Qwen3ForCausalLM, ids: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """The logprob of each token from the second on: [B, L - 1]. Padding at the end does not change earlier
    values, because attention is causal."""
    logits = model(ids).logits[:, :-1].float() / temperatures[:, :, None]
    return torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None])[:, :, 0]


def canaries(model: Qwen3ForCausalLM, rows: Sequence[Sample]) -> list[WeightCanary]:
    """Canaries from prefixes of rows after which one token is clearly the likeliest."""
    rng = random.Random(0)
    cuts = [row.ids[: rng.randrange(10, len(row.ids))] for row in rows[:48]]
    scored = sorted((_scored(model, cut) for cut in cuts), key=lambda found: -found[0])
    return [canary for _, canary in scored[:CANARIES]]


def _scored(model: Qwen3ForCausalLM, ids: Sequence[int]) -> tuple[float, WeightCanary]:
    """The margin of the likeliest token over the second, and the canary."""
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    (best, second), (token, _) = (found.tolist() for found in logprobs[-1].topk(2))
    forced = [float(logprobs[i - 1, ids[i]]) for i in range(1, len(ids))]
    canary = WeightCanary(
        prompt_ids=tuple(ids),
        token_id=token,
        logprob=best,
        prompt_logprobs=tuple(forced),
        tolerance=TOLERANCE,
    )
    return best - second, canary
