"""The plan of one training run. The trainer's process reads it from a file."""

from pathlib import Path
from typing import Any, Literal

from perdure.types import Frozen, GroupRequest, RolloutRequest, RunRequest

AGENT = "benchmarks.overhead.bash_agent:BashAgent"
Broken = Literal["", "reencode", "temperature", "split"]
"""Deliberate errors. `reencode`: the trainer encodes the text of each answer again. `temperature`: rollouts
are sampled at 0.7 and the trainer assumes 1. `split`: each turn is a segment with a share of the reward."""
Trainer = Literal["own", "trl"]
"""`own`: our loop, which publishes to Perdure's engines. `trl`: TRL's GRPOTrainer, which owns its vLLM."""
BROKEN_TEMPERATURE = 0.7
LAST_WRITTEN = "trainer_state.json"
"""The last file of TRL's checkpoint."""
GROUP_S = 900.0
"""A group ends after this time with its graded rollouts. Only an infrastructure failure takes longer."""


class Plan(Frozen):
    """The run of one seed. Its name is the prefix of its runs in Perdure, so the same plan continues."""

    name: str
    folder: Path
    """The folder of this run: versions of the weights, the trainer's state, measurements."""
    base: Path
    """The initial model and its tokenizer."""
    canary_rows: Path
    """Exported rows; canaries take their prompts from them."""
    training: tuple[str, ...]
    """References of instances."""
    held_out: tuple[str, ...]
    seed: int = 1
    steps: int = 40
    groups: int = 8
    samples: int = 8
    staleness: int = 0
    """Batches that are sampled ahead. Each is trained this many versions later."""
    learning_rate: float = 7e-4
    broken: Broken = ""
    trainer: Trainer = "own"
    evaluate_samples: int = 4
    evaluate_every: int = 20
    """Steps between evaluations, which also happen before the first step and after the last one."""

    @property
    def figures(self) -> Path:
        return self.folder / "figures.json"

    @property
    def checkpoints(self) -> Path:
        """TRL's folder."""
        return self.folder / "trl"

    def checkpoint(self) -> Path | None:
        """TRL's newest complete checkpoint. A killed trainer can leave a part of one."""
        complete = [file.parent for file in self.checkpoints.glob(f"checkpoint-*/{LAST_WRITTEN}")]
        return max(complete, key=optimizer_steps, default=None)

    def group(self, batch: int, instance: str, version: int) -> GroupRequest:
        """One group of a batch. `version`: the policy version that should sample it."""
        rollout = {
            **self._rollout(self.seed * 1000 + batch),
            "run_id": f"{self.name}-b{batch:03d}",
            "instance": instance,
            "policy_version": version,
            "max_staleness": self.staleness,
        }
        return GroupRequest(
            rollout=RolloutRequest.model_validate(rollout),
            n_samples=self.samples,
            deadline_s=GROUP_S,
        )

    def trl_fields(self) -> dict[str, Any]:
        """The fields of TRL's rollouts. TRL names the runs, and its temperature holds."""
        fields = self._rollout(self.seed)
        del fields["sampling"]["seed"]  # each step would sample with the same one
        return fields

    def evaluation(self, step: int) -> RunRequest:
        """All held-out instances, at temperature 1."""
        return RunRequest(
            run_id=f"{self.name}-held-{step:03d}",
            instances=self.held_out,
            n_samples=self.evaluate_samples,
            concurrency=64,
            rollout=self._rollout(self.seed, temperature=1.0),
        )

    def _rollout(self, seed: int, temperature: float | None = None) -> dict[str, Any]:
        if temperature is None:
            temperature = BROKEN_TEMPERATURE if self.broken == "temperature" else 1.0
        return rollout_fields() | {
            "sampling": {
                "temperature": temperature,
                "seed": seed,
                "max_tokens_per_turn": 40,
                "max_context_tokens": 256,
            }
        }


def optimizer_steps(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def rollout_fields() -> dict[str, Any]:
    """The minimal agent without a system message: a shell and at most five answers."""
    options = {"system": "", "submit_line": "done", "turn_limit": 5}
    return {"agent": AGENT, "agent_options": options}
