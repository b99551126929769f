"""Recipes that TorchTitan's launcher names: `--module perdure.integrations.torchtitan --config NAME`.

    PROMPT_DATA=train.jsonl SWE_REWARD_DENSE=1 python -m torchtitan.experiments.rl.train \\
        --module perdure.integrations.torchtitan --config rl_grpo_qwen3_8b_swe \\
        --hf_assets_path ./Qwen3-8B --rollouter.run_id try-1 --rollouter.rollout.sandbox daytona

Sizes and batch are those of TorchTitan's SWE example (pull request 3734): 8 prompts x 8 samples, rows
of 32,768 tokens, binary reward. We have never run them on GPUs. The example's own recipe names
(`..._swe_r2e`) give the same recipes in Daytona's sandboxes.

    DAYTONA_API_KEY=dtn_... PROMPT_DATA=r2e.jsonl HF_ASSETS_PATH=./Qwen3-1.7B python -m \\
        torchtitan.experiments.rl.train --module perdure.integrations.torchtitan \\
        --config rl_grpo_qwen3_1_7b_swe_r2e
"""

import dataclasses

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig
from torchtitan.experiments.rl.actors.generator import (
    SamplingConfig,
    VLLMCudagraphConfig,
    VLLMGenerator,
)
from torchtitan.experiments.rl.actors.trainer import PolicyTrainer
from torchtitan.experiments.rl.components.batcher import BatchConfig, Batcher
from torchtitan.experiments.rl.controller import AsyncLoopConfig, Controller, ValidationConfig
from torchtitan.experiments.rl.losses import GRPOLoss
from torchtitan.experiments.rl.models.vllm_registry import InferenceParallelismConfig
from torchtitan.experiments.rl.renderer import RendererConfig
from torchtitan.experiments.rl.rubrics import Rubric
from torchtitan.models.qwen3 import model_registry

from perdure.integrations.torchtitan.instances import Instances
from perdure.integrations.torchtitan.rollouter import PerdureRollouter, RolloutFields
from perdure.integrations.torchtitan.rubric import Graded
from perdure.settings import process_environment

ROW_TOKENS = 32_768
TURN_TOKENS = 4096


def rl_grpo_qwen3_1_7b_swe() -> Controller.Config:
    """One host of 8 GPUs."""
    return _recipe("1.7B", trainer=ParallelismConfig(tensor_parallel_degree=2))


def rl_grpo_qwen3_8b_swe() -> Controller.Config:
    """One host of 8 GPUs."""
    return _recipe("8B", trainer=ParallelismConfig(tensor_parallel_degree=4))


def rl_grpo_qwen3_14b_swe() -> Controller.Config:
    """Two hosts of 8 GPUs."""
    return _recipe("14B", trainer=ParallelismConfig(tensor_parallel_degree=8), generator_tp=8)


def rl_grpo_qwen3_32b_swe() -> Controller.Config:
    """Three hosts of 8 GPUs; two of them generate."""
    trainer = ParallelismConfig(data_parallel_shard_degree=8)
    return _recipe("32B", trainer=trainer, generator_tp=8, generators=2)


def rl_grpo_qwen3_30b_a3b_swe() -> Controller.Config:
    """One host of 8 GPUs. The generator of this mixture of experts runs without CUDA graphs."""
    trainer = ParallelismConfig(data_parallel_shard_degree=4)
    return _recipe("30B-A3B", trainer=trainer, experts=4)


def rl_grpo_qwen3_1_7b_swe_r2e() -> Controller.Config:
    return _on_daytona(rl_grpo_qwen3_1_7b_swe())


def rl_grpo_qwen3_8b_swe_r2e() -> Controller.Config:
    return _on_daytona(rl_grpo_qwen3_8b_swe())


def rl_grpo_qwen3_14b_swe_r2e() -> Controller.Config:
    return _on_daytona(rl_grpo_qwen3_14b_swe())


def rl_grpo_qwen3_32b_swe_r2e() -> Controller.Config:
    return _on_daytona(rl_grpo_qwen3_32b_swe())


def rl_grpo_qwen3_30b_a3b_swe_r2e() -> Controller.Config:
    return _on_daytona(rl_grpo_qwen3_30b_a3b_swe())


def _on_daytona(recipe: Controller.Config) -> Controller.Config:
    rollout = dataclasses.replace(recipe.rollouter.rollout, sandbox="daytona")
    recipe.rollouter = dataclasses.replace(recipe.rollouter, rollout=rollout)
    return recipe


def _recipe(
    size: str,
    *,
    trainer: ParallelismConfig,
    generator_tp: int = 4,
    generators: int = 1,
    experts: int = 1,
) -> Controller.Config:
    data = process_environment.named("PROMPT_DATA")
    return Controller.Config(
        model_spec=model_registry(size, attn_backend="varlen"),
        hf_assets_path=process_environment.named("HF_ASSETS_PATH") or f"Qwen3-{size}",
        num_generators=generators,
        async_loop=AsyncLoopConfig(
            num_training_steps=24,
            num_prompts_per_train_step=8,
            num_samples_per_prompt=8,
            validation=ValidationConfig(num_samples=0),
            batcher=Batcher.Config(batch=BatchConfig(local_batch_size=1, seq_len=ROW_TOKENS)),
        ),
        rollouter=PerdureRollouter.Config(
            train_dataset=Instances.Config(path=data),
            validation_dataset=Instances.Config(path=data, shuffle=False),
            rubric=Rubric.Config(reward_fns=[Graded.Config()]),
            rollout=RolloutFields(max_context_tokens=ROW_TOKENS - 1),
        ),
        renderer=RendererConfig(name="qwen3"),
        trainer=PolicyTrainer.Config(
            optimizer=default_adamw(lr=1e-6),
            lr_scheduler=LRSchedulersContainer.Config(
                warmup_steps=2, decay_type="linear", min_lr_factor=1.0
            ),
            parallelism=trainer,
            checkpoint=CheckpointManager.Config(enable=True, initial_load_in_hf=True, interval=8),
            loss=GRPOLoss.Config(),
        ),
        generator=VLLMGenerator.Config(
            parallelism=InferenceParallelismConfig(
                tensor_parallel_degree=generator_tp, expert_parallel_degree=experts
            ),
            cudagraph=VLLMCudagraphConfig(enable=experts == 1),
            checkpoint=CheckpointManager.Config(enable=False),
            sampling=SamplingConfig(temperature=1.0, top_p=1.0, max_tokens=TURN_TOKENS),
        ),
    )
