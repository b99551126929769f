"""SkyRL's own experiment, data and fully asynchronous trainer over Perdure's generator, for one step.

    python tests/real/trainers/skyrl_main.py FOLDER true|false URL      # generator.step_wise_trajectories

The experiment is the page's, in FOLDER/page.py. SkyRL simulates only what needs GPUs: it builds no models, and
its optimizer step is a sleep. Its inference server is a vLLM-like one at URL. All up to that step's tensors is
real. Prints JSON.
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
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import ray  # noqa: E402
import tiny_model  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.dataset import PromptDataset  # noqa: E402
from skyrl.train.entrypoints.main_base import BasePPOExp  # noqa: E402
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim  # noqa: E402
from skyrl.train.utils import validate_cfg  # noqa: E402

from perdure.integrations import skyrl  # noqa: E402

INSTANCES = ("tests/add", "tests/leave-it")
STARTS = 6
stepped = []


def start_ray():
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


class Trainer(FullyAsyncTrainerSim):
    async def _run_training(self, training_input):
        stepped.append(training_input)
        # SkyRL 0.4.0's trainer calls both, but its simulated dispatch has neither.
        self.dispatch.get_timing_metrics = dict
        self.dispatch.finalize_pending_saves = lambda model: None
        return await super()._run_training(training_input)


def configuration(folder: Path, step_wise: str, url: str) -> SkyRLTrainConfig:
    rows = folder / "rows.jsonl"
    said = [{"role": "user", "content": "see the instance"}]
    lines = [{"prompt": said, "instance": one} for one in INSTANCES]
    rows.write_text("\n".join(json.dumps(line) for line in lines))
    options = {
        "data.train_data": f"[{rows}]",
        "environment.env_class": "perdure",
        "generator.batched": "false",
        "generator.inference_engine.run_engines_locally": "false",
        "generator.inference_engine.external_proxy_url": url,
        "generator.inference_engine.external_server_urls": f"[{url}]",
        "generator.n_samples_per_prompt": 2,
        "generator.sampling_params.max_generate_length": 512,
        "generator.sampling_params.temperature": 0.8,
        "generator.step_wise_trajectories": step_wise,
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "trainer.algorithm.use_kl_loss": "false",
        "trainer.ckpt_interval": -1,
        "trainer.ckpt_path": folder / "checkpoints",
        "trainer.epochs": 1,
        "trainer.eval_interval": -1,
        "trainer.export_path": folder / "exports",
        "trainer.fully_async.enabled": "true",
        "trainer.fully_async.num_parallel_generation_workers": 2,
        "trainer.fully_async.simulate_training": "true",
        "trainer.fully_async.simulate_training_step_seconds": 0,
        "trainer.hf_save_interval": -1,
        "trainer.logger": "console",
        "trainer.max_training_steps": 1,
        "trainer.micro_forward_batch_size_per_gpu": 1,
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.placement.colocate_all": "false",
        "trainer.policy.model.path": tiny_model.save(folder / "model"),
        "trainer.policy_mini_batch_size": 2,
        "trainer.resume_mode": "none",
        "trainer.train_batch_size": 2,
    }
    return SkyRLTrainConfig.from_cli_overrides([f"{name}={v}" for name, v in options.items()])


def _trained(step) -> list:
    """Of each row, the ids and logprobs of the tokens that the loss takes. Responses end their rows."""
    taken = step["loss_mask"].bool()
    ids = step["sequences"][:, -taken.shape[1] :]
    logprobs = step["rollout_logprobs"]
    return [[ids[n][row].tolist(), logprobs[n][row].tolist()] for n, row in enumerate(taken)]


def main(name: str, step_wise: str, url: str) -> dict:
    folder = Path(name)
    names = {"BasePPOExp": BasePPOExp, "skyrl": skyrl}
    exec((folder / "page.py").read_text(), names)

    class Experiment(names["Exp"]):
        def get_train_dataset(self):
            limit = self.cfg.trainer.max_prompt_length
            # Its eight processes would import all of this again.
            return PromptDataset(self.cfg.data.train_data, self.tokenizer, limit, num_workers=1)

        def get_inference_client(self):
            return RemoteInferenceClient(
                url, [url], 1, model_name="policy", tokenizer=self.tokenizer
            )

        def get_trainer(self, **parts):
            return Trainer(**parts)

    config = configuration(folder, step_wise, url)
    validate_cfg(config)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    start_ray()
    experiment = Experiment(config)
    experiment.run()
    ray.shutdown()
    (step,) = stepped
    return {
        "step": experiment.trainer.global_step,
        "rows": len(step["sequences"]),
        "trained": _trained(step),
        "rewards": sorted(float(row.sum()) for row in step["rewards"]),
        "uids": sorted(step.metadata["uids"]),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:]), default=str))
