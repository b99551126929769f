"""With `engine="perdure"`: publishes TRL's weights to Perdure's engines before each step is sampled.

`Engines` replaces the trainer's vLLM client (`GRPOTrainer.vllm_generation`), which TRL asks to sync
weights. TRL's loss then also corrects for the recorded logprobs.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perdure.engines.weights.weight_publishing_sync import Weights
from perdure.engines.weights.weight_update import WeightCanary
from perdure.errors import ConfigurationError

KEPT_VERSIONS = 2
"""The published version, and the one that an engine gets back if an update fails."""
TEXTS = (
    "def add(a, b):\n    return a +",
    "import os\nimport sys\n\nif __name__ ==",
    "The capital of France is Paris, and the capital of Germany is",
    '{"name": "bash", "arguments": {"command":',
    "for i in range(10):\n    print(",
    "$ git status\nOn branch main\nnothing to commit, working tree",
    "class Stack:\n    def __init__(self):\n        self.items =",
    "one two three four five six seven",
    "Traceback (most recent call last):\n  File",
    "0, 1, 1, 2, 3, 5, 8, 13,",
)
CANARIES = 6
"""How many texts become canaries: those after which one token is clearly the likeliest. If two tokens
tie, an engine may pick the other one."""


class Engines:
    """Perdure's engines, as `GRPOTrainer.vllm_generation`."""

    def __init__(self, trainer: Any) -> None:
        """Raises: ConfigurationError."""
        if trainer.use_vllm:
            raise ConfigurationError("use_vllm must be false: Perdure's engines sample")
        if hasattr(trainer.model, "peft_config"):
            raise ConfigurationError(
                "engines take whole checkpoints, not PEFT's adapters: let TRL's vLLM sample, or use "
                "publish=False and publish the merged model yourself"
            )
        self._trainer = trainer
        self._weights = Weights()
        published = self._weights.published()
        self.version = -1 if published is None else published.version
        """The newest version that the engines have."""
        self._wait()
        trainer.use_vllm, trainer.vllm_generation = True, self
        self.sync_weights()
        trainer._last_loaded_step = trainer.state.global_step

    def sync_weights(self) -> None:
        """Publish the current model. TRL calls this in each process before a step's first rollouts.

        Raises: UpdateRefused, ConfigurationError, StoreUnavailable.
        """
        self.version += 1
        folder = self._folder(self.version)
        self._trainer.save_model(str(folder), _internal_call=True)  # no push to the hub
        found = canaries(self._trainer)
        if self._trainer.accelerator.is_main_process:
            self._weights.publish(self.version, folder, found)
            shutil.rmtree(self._folder(self.version - KEPT_VERSIONS), ignore_errors=True)
        self._wait()

    def _folder(self, version: int) -> Path:
        return Path(self._trainer.args.output_dir).absolute() / "perdure-weights" / str(version)

    def _wait(self) -> None:
        self._trainer.accelerator.wait_for_everyone()


def canaries(trainer: Any) -> list[WeightCanary]:
    """The model's current predictions after the texts where it is most certain."""
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    with _judging(trainer.model):
        scored = [_scored(trainer, ids) for ids in prompts]
    surest = sorted(scored, key=lambda pair: -pair[0])[:CANARIES]
    return [canary for _, canary in surest]


def _scored(trainer: Any, ids: Sequence[int]) -> tuple[float, WeightCanary]:
    """The margin of the likeliest token over the second, and the canary."""
    import torch

    prompt = torch.tensor([ids], device=trainer.accelerator.device)
    logprobs = trainer.model(prompt).logits[0].float().log_softmax(-1).cpu()
    (best, second), (token, _) = (found.tolist() for found in logprobs[-1].topk(2))
    forced = tuple(float(logprobs[i - 1, ids[i]]) for i in range(1, len(ids)))
    canary = WeightCanary(
        prompt_ids=tuple(ids), token_id=token, logprob=best, prompt_logprobs=forced
    )
    return best - second, canary


@contextmanager
def _judging(model: Any) -> Iterator[None]:
    import torch

    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
