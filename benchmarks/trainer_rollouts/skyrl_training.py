"""SkyRL's fully asynchronous trainer over its own rollout code, or over Perdure's. Prints JSON.

    python benchmarks/trainer_rollouts/skyrl_training.py '{"side": "skyrl", ...}'    # the fields of Training

Experiment, data, staleness control, scheduling and conversion to tensors are SkyRL's. It has no GPU here, so
its own simulated trainer stands in for the optimizer: a step sleeps, then pauses and resumes the engine.
SkyRL's own agent loop runs each command in a plain process on the host, in a copy of the repository, and the
hidden test there afterwards.
"""

# mypy: ignore-errors

import sys
import typing
from pathlib import Path

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic wants this one below Python 3.12

import transformers.modeling_utils  # noqa: E402, F401  # it asks once for FlashAttention, which is absent

sys.path.append(str(Path(__file__).parents[2] / "tests/real/trainers"))

import absent  # noqa: E402

absent.stand_in(absent.SKYRL)

import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import ray  # noqa: E402
import skyrl_gym  # noqa: E402
from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.dataset import PromptDataset  # noqa: E402
from skyrl.train.entrypoints.main_base import BasePPOExp  # noqa: E402
from skyrl.train.fully_async_trainer_sim import FullyAsyncTrainerSim  # noqa: E402
from skyrl.train.utils import validate_cfg  # noqa: E402
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput  # noqa: E402
from transformers import Qwen3Config  # noqa: E402

from benchmarks import common_job  # noqa: E402
from perdure.integrations import skyrl  # noqa: E402

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
MAX_TOKENS = 32_768
stepped = []
"""The tensors of each step."""


class ShellEnv(BaseTextEnv):
    """The common job as an environment of skyrl-gym: a tool call is a bash command in a copy of the
    repository; the job's hidden test gives the reward."""

    def __init__(self, env_config, extras):
        super().__init__()
        self.max_turns = extras["max_turns"]
        self.folder = Path(tempfile.mkdtemp(prefix="skyrl-env-"))
        self.tree = common_job.make_repository(self.folder / "repo")

    def step(self, action):
        self.turns += 1
        command = json.loads(CALL.search(action).group(1))["arguments"]["command"]
        ran = subprocess.run(
            ["/bin/bash", "-c", command], cwd=self.tree, capture_output=True, text=True, check=False
        )
        output = ran.stdout + ran.stderr
        done = output.startswith(common_job.DONE) or self.turns >= self.max_turns
        said = json.dumps({"returncode": ran.returncode, "output": output})
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "tool", "content": said}],
            reward=self._grade() if done else 0.0,
            done=done,
            metadata={},
        )

    def _grade(self):
        (self.tree / "test_calc.py").write_text(common_job.TEST)
        test = [common_job.PYTHON, "test_calc.py"]
        ran = subprocess.run(test, cwd=self.tree, capture_output=True, check=False)
        return float(ran.returncode == 0)

    def close(self):
        shutil.rmtree(self.folder)


class Trainer(FullyAsyncTrainerSim):
    async def _run_training(self, training_input):
        stepped.append(training_input)
        # SkyRL 0.4.0's trainer calls both, but its simulated dispatch has neither.
        self.dispatch.get_timing_metrics = dict
        self.dispatch.finalize_pending_saves = lambda model: None
        return await super()._run_training(training_input)


def configuration(asked, folder: Path) -> SkyRLTrainConfig:
    rows = folder / "rows.jsonl"
    said = [{"role": "user", "content": common_job.STATEMENT}]
    lines = [
        {"prompt": said, "instance": f"toy/{name}"}
        for name in common_job.instance_ids(asked.steps * asked.groups)
    ]
    rows.write_text("\n".join(json.dumps(line) for line in lines))
    model = folder / "model"
    shutil.copytree(asked.tokenizer, model)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    ).save_pretrained(model)
    options = {
        "data.train_data": f"[{rows}]",
        "environment.env_class": "shell",
        "generator.batched": "false",
        "generator.inference_engine.run_engines_locally": "false",
        "generator.inference_engine.external_proxy_url": asked.url,
        "generator.inference_engine.external_server_urls": f"[{asked.url}]",
        "generator.max_input_length": MAX_TOKENS,
        "generator.max_turns": asked.turns,
        "generator.n_samples_per_prompt": asked.samples,
        "generator.sampling_params.logprobs": 1,
        "generator.sampling_params.max_generate_length": 2048,
        "generator.step_wise_trajectories": "false",
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "trainer.algorithm.use_kl_loss": "false",
        "trainer.ckpt_interval": -1,
        "trainer.ckpt_path": folder / "checkpoints",
        "trainer.epochs": 1,
        "trainer.eval_interval": -1,
        "trainer.export_path": folder / "exports",
        "trainer.fully_async.enabled": "true",
        "trainer.fully_async.max_staleness_steps": 1,
        "trainer.fully_async.num_parallel_generation_workers": 2 * asked.groups,
        "trainer.fully_async.simulate_training": "true",
        "trainer.fully_async.simulate_training_step_seconds": asked.step_s,
        "trainer.hf_save_interval": -1,
        "trainer.logger": "console",
        "trainer.max_prompt_length": 2048,
        "trainer.max_training_steps": asked.steps,
        "trainer.micro_forward_batch_size_per_gpu": 1,
        "trainer.micro_train_batch_size_per_gpu": 1,
        "trainer.placement.colocate_all": "false",
        "trainer.policy.model.path": model,
        "trainer.policy_mini_batch_size": asked.groups,
        "trainer.resume_mode": "none",
        "trainer.train_batch_size": asked.groups,
    }
    return SkyRLTrainConfig.from_cli_overrides([f"{name}={v}" for name, v in options.items()])


def main(asked, folder: Path) -> dict:
    class Experiment(BasePPOExp):
        def get_train_dataset(self):
            limit = self.cfg.trainer.max_prompt_length
            # Its eight processes would import all of this again.
            return PromptDataset(self.cfg.data.train_data, self.tokenizer, limit, num_workers=1)

        def get_inference_client(self):
            return RemoteInferenceClient(
                asked.url, [asked.url], 1, model_name="policy", tokenizer=self.tokenizer
            )

        def get_generator(self, cfg, tokenizer, inference_engine_client):
            if asked.side == "skyrl":
                return super().get_generator(cfg, tokenizer, inference_engine_client)
            return skyrl.generator(
                cfg.generator,
                inference_engine_client,
                run_id=asked.run_id,
                agent="benchmarks.overhead.bash_agent:BashAgent",
            )

        def get_trainer(self, **parts):
            return Trainer(**parts)

    skyrl_gym.register(id="shell", entry_point=ShellEnv)
    config = configuration(asked, folder)
    validate_cfg(config)
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    Experiment(config).run()
    ray.shutdown()
    return {
        "steps": len(stepped),
        "rollouts": sum(len(step["sequences"]) for step in stepped),
        "right": sum(float(step["rewards"].sum()) for step in stepped),
        "trained": sum(int(step["loss_mask"].sum()) for step in stepped),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="skyrl-") as name:
        print(json.dumps(main(SimpleNamespace(**json.loads(sys.argv[1])), Path(name))))
