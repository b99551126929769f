"""TRL's GRPOTrainer with its colocated vLLM: `python -m benchmarks.learn.trainer.trl_training PLAN`.

TRL owns the engine, its weights, the optimizer and the checkpoints. Perdure only makes the rollouts. The
batches, the learning rate and the loss are those of `training_loop`. The same plan continues after a kill.
"""

# mypy: ignore-errors
# TRL is installed beside vLLM only.

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import trl.generation.vllm_generation
import vllm.model_executor.layers.utils
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.learn.batch_schedule import batch, learning_rate
from benchmarks.learn.trainer import grpo_step, tiny_policy
from benchmarks.learn.trainer.training_figures import Figures, Step
from benchmarks.learn.training_plan import Plan, optimizer_steps
from perdure.episodes.episode import Episode, EpisodeSegments
from perdure.episodes.episode_store import read_run
from perdure.integrations import trl as perdure_trl
from perdure.settings.settings_loader import load_settings
from perdure.storage.store_url import open_store

KEPT_CHECKPOINTS = 2
GAP = "sampling/sampling_logp_difference"
"""TRL's name for the differences between recorded and recomputed logprobs."""


class Recorder(TrainerCallback):
    """Wraps Perdure's hook, and writes the figures of each step and evaluation."""

    def __init__(self, plan: Plan, figures: Figures) -> None:
        self._figures = figures
        self._rollouts = perdure_trl.Rollouts(run_id=plan.name, **plan.trl_fields())
        self._step = Step(0)
        self._sampled = 0.0
        self._began = 0.0

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        began, used = time.monotonic(), time.process_time()
        rows = self._rollouts(prompts, trainer)
        done = trainer.state.global_step // grpo_step.MINIBATCHES
        if not trainer.model.training:
            self._figures.add_evaluation(done, rows["perdure_reward"])
            return rows
        self._step = Step(done, wait_s=time.monotonic() - began)
        self._step.sdk_cpu_s = time.process_time() - used
        self._began = time.monotonic()
        episodes = _episodes(rows)
        groups = groupby(episodes, attrgetter("group_id"))
        self._step.add_episodes(
            episodes, [[EpisodeSegments(one, ()) for one in group] for _, group in groups]
        )
        return rows

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """TRL logs after the last optimizer step of each call's rollouts."""
        if f"{GAP}/max" not in (logs or {}):
            return  # an evaluation, or the summary at the end
        self._step.train_s = time.monotonic() - self._began
        self._step.grpo = {
            "gap_mean": logs[f"{GAP}/mean"],
            "gap_max": logs[f"{GAP}/max"],
            "gradient_norm": logs["grad_norm"],
        }
        self._figures.published(self._step)


def _episodes(rows: dict[str, Any]) -> list[Episode]:
    """Those of a call. Raises: RuntimeError if the trainer got one of them twice."""
    names = [known["rollout"] for known in rows["perdure_metadata"] if known]
    if len(set(names)) != len(names):
        raise RuntimeError("the trainer got a rollout twice")
    runs = {known["group_id"].partition("/")[0] for known in rows["perdure_metadata"] if known}
    store = open_store(load_settings())
    found = [one for run in runs for one in asyncio.run(read_run(store, run))]
    return [one for one in found if one.rollout_id in set(names)]


def trainer_of(plan: Plan, recorder: Recorder, *, resumes: bool) -> GRPOTrainer:
    model = tiny_policy.load(plan.base / "model")
    optimizer = grpo_step.optimizer_of(model, plan.learning_rate)

    def share(done: int) -> float:
        return learning_rate(plan, done // grpo_step.MINIBATCHES) / plan.learning_rate

    return GRPOTrainer(
        model,
        perdure_trl.reward,
        _configuration(plan, evaluates_first=not resumes),
        Dataset.from_list([{"prompt": one} for n in range(plan.steps) for one in batch(plan, n)]),
        Dataset.from_list([{"prompt": one} for one in plan.held_out]),
        rollout_func=recorder,
        callbacks=[recorder],
        optimizers=(optimizer, LambdaLR(optimizer, share)),
    )


def _configuration(plan: Plan, *, evaluates_first: bool) -> GRPOConfig:
    rollouts = plan.groups * plan.samples
    return GRPOConfig(
        str(plan.checkpoints),
        seed=plan.seed,
        max_steps=plan.steps * grpo_step.MINIBATCHES,
        per_device_train_batch_size=rollouts // grpo_step.MINIBATCHES,
        steps_per_generation=grpo_step.MINIBATCHES,
        num_generations=plan.samples,
        shuffle_dataset=False,  # a restarted TRL would shuffle a later epoch as the first one
        temperature=1.0,
        max_completion_length=plan.trl_fields()["sampling"]["max_tokens_per_turn"],
        loss_type="bnpo",  # the mean over the tokens of a minibatch
        epsilon=grpo_step.CLIP_LOW,
        epsilon_high=grpo_step.CLIP_HIGH,
        max_grad_norm=grpo_step.GRADIENT_NORM,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=tiny_policy.CONTEXT,
        use_cpu=True,
        bf16=False,
        per_device_eval_batch_size=len(plan.held_out) * plan.evaluate_samples,
        num_generations_eval=plan.evaluate_samples,
        eval_strategy="steps",
        eval_on_start=evaluates_first,
        eval_steps=plan.evaluate_every * grpo_step.MINIBATCHES,
        save_steps=grpo_step.MINIBATCHES,
        save_total_limit=KEPT_CHECKPOINTS,
        logging_steps=grpo_step.MINIBATCHES,
        report_to="none",
        disable_tqdm=True,
    )


def make_vllm_trainable_on_a_cpu() -> None:
    """Two patches below TRL's engine client.

    TRL has no options for eager mode and float32. And vLLM on CPU packs its linear weights when it starts,
    so that weights which TRL loads later would not be used. vLLM's own fallback uses them unpacked.
    """
    client = trl.generation.vllm_generation
    client.LLM = partial(client.LLM, enforce_eager=True, dtype="float32")

    def unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm = unpacked


def main(plan: Plan) -> None:
    torch.set_num_threads(1)
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    make_vllm_trainable_on_a_cpu()
    checkpoint = plan.checkpoint()
    figures = Figures.read(plan)
    if checkpoint is not None:
        figures.resumed(optimizer_steps(checkpoint) // grpo_step.MINIBATCHES)
    trainer = trainer_of(plan, Recorder(plan, figures), resumes=checkpoint is not None)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    figures.finish()


if __name__ == "__main__":
    main(Plan.model_validate_json(Path(sys.argv[1]).read_text()))
