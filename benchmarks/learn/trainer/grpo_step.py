"""One GRPO step: clipped ratios against the recorded logprobs, mean over tokens, no KL."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from benchmarks.learn.trainer.tiny_policy import batched, logprobs_of
from benchmarks.learn.training_rows import Sample

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
MINIBATCHES = 2
GRADIENT_NORM = 1.0


@dataclass
class StepFigures:
    trained_tokens: int = 0
    """Tokens with mask 1."""
    read_tokens: int = 0
    """All tokens of the sequences that the step reads."""
    gap_mean: float = 0.0
    """|trainer's logprob - recorded logprob| before the step's first update."""
    gap_max: float = 0.0
    clipped: float = 0.0
    """Share of tokens whose ratio is outside the clip range."""
    gradient_norm: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def optimizer_of(model: Qwen3ForCausalLM, learning_rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )


def step(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.AdamW,
    samples: Sequence[Sample],
    *,
    learning_rate: float,
    number: int,
) -> StepFigures:
    """One epoch over the samples in minibatches. `number` counts steps from 0."""
    figures = StepFigures()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    for first, minibatch in _minibatches(samples, number):
        ids, mask, recorded, temperatures, advantages = batched(minibatch)
        now = logprobs_of(model, ids, temperatures)
        mask, recorded = mask[:, 1:], recorded[:, 1:]
        before = torch.where(recorded.isnan(), now.detach(), recorded)
        ratio = torch.exp(now - before)
        bounded = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        gain = torch.minimum(ratio * advantages, bounded * advantages)
        loss = -(gain * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        figures.gradient_norm = max(figures.gradient_norm, float(norm))
        _count(figures, mask, ratio != bounded)
        if first:
            _compare(figures, mask, (now - before).detach().abs() * mask)
    return figures


def _minibatches(samples: Sequence[Sample], number: int) -> Iterator[tuple[bool, list[Sample]]]:
    order = list(samples)
    random.Random(number).shuffle(order)
    size = max(1, -(-len(order) // MINIBATCHES))
    for start in range(0, len(order), size):
        yield start == 0, order[start : start + size]


def _count(figures: StepFigures, mask: torch.Tensor, clipped: torch.Tensor) -> None:
    tokens = int(mask.sum())
    figures.trained_tokens += tokens
    figures.read_tokens += mask.numel()
    figures.clipped += float((clipped * mask).sum()) / tokens / MINIBATCHES


def _compare(figures: StepFigures, mask: torch.Tensor, gap: torch.Tensor) -> None:
    figures.gap_mean, figures.gap_max = float(gap.sum() / mask.sum()), float(gap.max())
