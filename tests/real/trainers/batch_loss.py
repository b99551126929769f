"""Computes the loss that a page prints, over a batch as tensors, and prints it as JSON.

    python tests/real/trainers/batch_loss.py PAGE

PAGE: a file with what the page prints. The model gives each token the same probability. The batch has
three rollouts, of one, two and two sampled tokens, with rewards 1, 0 and 0.
"""

# mypy: ignore-errors

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from perdure.episodes.episode import EpisodeParts, EpisodeSegments, build_episode
from perdure.episodes.training_batch import BatchBuilder
from perdure.episodes.trajectory_segments import cut
from perdure.types import Grade, Outcome, Rewards, RolloutRequest, RolloutStatus

sys.path.append(str(Path(__file__).parents[2] / "workflows"))  # a trainer's `tests` hides ours
from made_turns import turns

VOCABULARY = 64


def rollout(sample_index: int, reward: float) -> EpisodeSegments:
    taken = turns(1, sample_index)[: sample_index + 1]
    parts = EpisodeParts(
        request=RolloutRequest(run_id="r", instance="d/i", sample_index=sample_index),
        status=RolloutStatus.GRADED,
        grade=Grade(outcome=Outcome.RESOLVED, rewards=Rewards(binary=reward)),
        started_at=0.0,
        finished_at=1.0,
        turns=taken,
    )
    segments = tuple(cut(taken))
    return EpisodeSegments(build_episode(parts, segments), segments)


def main(page: str) -> dict:
    builder = BatchBuilder()
    for sample_index, reward in enumerate((1.0, 0.0, 0.0)):
        builder.add(rollout(sample_index, reward))
    batch = builder.batch()

    def model(tokens: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(*tokens.shape, VOCABULARY, requires_grad=True))

    names = {"model": model, "batch": batch.torch("cpu")}
    exec(Path(page).read_text(), names)
    names["loss"].backward()
    return {"loss": names["loss"].item(), "advantages": batch.advantages.tolist()}


print(json.dumps(main(sys.argv[1])))
