"""Supervised training on exported rollouts: `python -m benchmarks.learn.trainer.sft_training ROWS FOLDER`.

ROWS is Perdure's export; only tokens with mask 1 are trained. Training starts with the rollouts with
reward 1, until the model can repair. Then it uses all rollouts, careless ones too, so that reinforcement
learning begins between 0.2 and 0.4. FOLDER holds the tokenizer and gets the model.
"""

import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from benchmarks.learn.trainer import exported_rows, tiny_policy
from benchmarks.learn.training_rows import Sample

BATCH = 32
LEARNING_RATE = 4e-3
WARM_UP_STEPS = 20
RIGHT_STEPS = 300
ALL_STEPS = 60
"""With more epochs, the model memorizes each lesson. Then all rollouts of an instance end alike, and
reinforcement learning has no gradient."""
THREADS = 1
"""Two are slower on a shared host of two cores."""


def train(model: Qwen3ForCausalLM, rows: Sequence[Sample], steps: int, seed: int) -> float:
    """The mean loss per trained token over the last ten steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    rng, losses = random.Random(seed), []
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * _schedule(number, steps)
        ids, mask, _, temperatures, _ = tiny_policy.batched(rng.sample(rows, min(BATCH, len(rows))))
        logprobs = tiny_policy.logprobs_of(model, ids, torch.ones_like(temperatures))
        loss = -(logprobs * mask[:, 1:]).sum() / mask[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return math.fsum(losses[-10:]) / len(losses[-10:])


def _schedule(number: int, steps: int) -> float:
    """Warm-up, then cosine decay to a tenth."""
    if number < WARM_UP_STEPS:
        return (number + 1) / WARM_UP_STEPS
    return 0.1 + 0.45 * (1 + math.cos(math.pi * number / steps))


def main(rows: Path, folder: Path) -> None:
    torch.set_num_threads(THREADS)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = tiny_policy.new_model(tokenizer, seed=1)
    every = exported_rows.read(rows)
    right = [row.sample for row in every if row.reward == 1]
    found = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "rollouts": len(every),
        "right": len(right),
        "loss_right": train(model, right, RIGHT_STEPS, seed=1),
        "loss_all": train(model, [row.sample for row in every], ALL_STEPS, seed=2),
    }
    tiny_policy.save(model, folder / "model", folder)
    (folder / "sft.json").write_text(json.dumps(found, indent=1))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
