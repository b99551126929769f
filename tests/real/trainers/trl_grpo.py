"""TRL's GRPOTrainer over Perdure's rollouts and engines, for some optimizer steps on a CPU. Prints JSON.

    python tests/real/trainers/trl_grpo.py MODEL OUTPUT PAGE

PAGE: a file with what the page prints, which is run.
"""

# mypy: ignore-errors

import hashlib
import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from perdure.integrations import trl

STEPS, SIBLINGS = 2, 8
seen, trained = [], []


def weights(model) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        digest.update(tensor.float().numpy().tobytes())
    return digest.hexdigest()


class Watched(GRPOTrainer):
    """Notes what its loss is computed from, and the weights that it is computed with."""

    def train(self):
        super().train()
        trained.append(self.model)

    def _compute_loss(self, model, inputs):
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        recorded = inputs["sampling_per_token_logps"]
        rows = []
        for n, kept in enumerate(inputs["completion_mask"].bool()):
            rows.append(
                {
                    "ids": inputs["completion_ids"][n][kept].tolist(),
                    "mask": mask[n][kept].tolist(),
                    "logprobs": recorded[n][kept].tolist(),
                    "advantage": inputs["advantages"][n].item(),
                }
            )
        gap = ((inputs["old_per_token_logps"] - recorded) * mask).abs().max()
        ratio = inputs["importance_sampling_ratio"]
        seen.append(
            {
                "weights": weights(model),
                "rows": rows,
                "gap": gap.item(),
                "ratio": [ratio.min().item(), ratio.max().item()],
            }
        )
        return super()._compute_loss(model, inputs)


def main(model: str, output: str, page: str) -> dict:
    torch.set_num_threads(1)
    config = GRPOConfig(
        output,
        max_steps=STEPS,
        per_device_train_batch_size=SIBLINGS,
        num_generations=SIBLINGS,
        temperature=0.8,
        max_completion_length=16,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    names = {"Dataset": Dataset, "GRPOTrainer": Watched, "trl": trl}
    names |= {"model": model, "config": config}
    exec(Path(page).read_text(), names)
    return {"steps": seen, "weights": weights(trained[0])}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
