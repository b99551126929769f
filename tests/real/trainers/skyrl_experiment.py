"""SkyRL's own experiment, data and fully asynchronous trainer, on a host without a GPU.

SkyRL simulates only what needs GPUs: it builds no models, and its optimizer step is a sleep, after which it
pauses and resumes the engine. All up to that step's tensors is real. Import this before SkyRL.
"""

# mypy: ignore-errors

import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic wants this one below Python 3.12

import absent  # noqa: E402
import transformers.modeling_utils  # noqa: E402, F401  # it asks once for FlashAttention, which is not there

absent.stand_in(absent.SKYRL)

import json  # noqa: E402
import os  # noqa: E402
from pathlib import Path  # noqa: E402

import ray  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.dataset import PromptDataset  # noqa: E402
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim  # noqa: E402
from skyrl.train.utils import validate_cfg  # noqa: E402

STARTS = 6
stepped = []
"""The tensors of each step."""


class Trainer(FullyAsyncTrainerSim):
    async def _run_training(self, training_input):
        stepped.append(training_input)
        # SkyRL 0.4.0's trainer calls both, but its simulated dispatch has neither.
        self.dispatch.get_timing_metrics = dict
        self.dispatch.finalize_pending_saves = lambda model: None
        return await super()._run_training(training_input)


class WithoutGpu:
    """Put before an experiment's class: what it needs on such a host."""

    def get_train_dataset(self):
        limit = self.cfg.trainer.max_prompt_length
        # Its eight processes would import all of this again.
        return PromptDataset(self.cfg.data.train_data, self.tokenizer, limit, num_workers=1)

    def get_inference_client(self):
        url = self.cfg.generator.inference_engine.external_proxy_url
        return RemoteInferenceClient(url, [url], 1, model_name="policy", tokenizer=self.tokenizer)

    def get_trainer(self, **parts):
        return Trainer(**parts)


def configuration(
    folder: Path,
    rows: list[dict],
    url: str,
    *,
    model: Path | str,
    groups: int,
    samples: int,
    steps: int,
    options: dict,
) -> SkyRLTrainConfig:
    """`url`: of a vLLM-like server. `groups`: of a step, with so many `samples` each. `options`: the caller's
    other ones."""
    data = folder / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    given = {
        "data.train_data": f"[{data}]",
        "generator.batched": "false",
        "generator.inference_engine.run_engines_locally": "false",
        "generator.inference_engine.external_proxy_url": url,
        "generator.inference_engine.external_server_urls": f"[{url}]",
        "generator.n_samples_per_prompt": samples,
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "trainer.algorithm.use_kl_loss": "false",
        "trainer.ckpt_interval": -1,
        "trainer.ckpt_path": folder / "checkpoints",
        "trainer.epochs": 1,
        "trainer.eval_interval": -1,
        "trainer.export_path": folder / "exports",
        "trainer.fully_async.enabled": "true",
        "trainer.fully_async.simulate_training": "true",
        "trainer.hf_save_interval": -1,
        "trainer.logger": "console",
        "trainer.max_training_steps": steps,
        "trainer.micro_forward_batch_size_per_gpu": 1,
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.placement.colocate_all": "false",
        "trainer.policy.model.path": model,
        "trainer.policy_mini_batch_size": groups,
        "trainer.resume_mode": "none",
        "trainer.train_batch_size": groups,
        **options,
    }
    return SkyRLTrainConfig.from_cli_overrides([f"{name}={v}" for name, v in given.items()])


def run(experiment_class: type, config: SkyRLTrainConfig) -> object:
    """The experiment, after its last step."""
    validate_cfg(config)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    _start_ray()
    experiment = experiment_class(config)
    experiment.run()
    ray.shutdown()
    return experiment


def _start_ray():
    """Ray gives its own node 30 s, which a busy host may exceed."""
    for left in reversed(range(STARTS)):
        try:
            ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        except Exception as error:
            if left == 0 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
        else:
            return
