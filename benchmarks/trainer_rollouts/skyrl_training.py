"""SkyRL's fully asynchronous trainer over its own rollout code, or over Perdure's. Prints JSON.

    python benchmarks/trainer_rollouts/skyrl_training.py '{"side": "skyrl", ...}'    # the fields of Training

Experiment, data, staleness control, scheduling and conversion to tensors are SkyRL's. It has no GPU here, so
its own simulated trainer stands in for the optimizer: a step sleeps, then pauses and resumes the engine.
SkyRL's own agent loop runs each command in a plain process on the host, in a copy of the repository, and the
hidden test there afterwards.
"""

# mypy: ignore-errors

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[2] / "tests/real/trainers"))

import skyrl_experiment
import skyrl_gym
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from transformers import Qwen3Config

from benchmarks import common_job
from perdure.integrations import skyrl

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
MAX_TOKENS = 32_768


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


def configuration(asked, folder: Path) -> SkyRLTrainConfig:
    said = [{"role": "user", "content": common_job.STATEMENT}]
    instances = common_job.instance_ids(asked.steps * asked.groups)
    model = folder / "model"
    shutil.copytree(asked.tokenizer, model)
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    ).save_pretrained(model)
    return skyrl_experiment.configuration(
        folder,
        [{"prompt": said, "instance": f"toy/{name}"} for name in instances],
        asked.url,
        model=model,
        groups=asked.groups,
        samples=asked.samples,
        steps=asked.steps,
        options={
            "environment.env_class": "shell",
            "generator.max_input_length": MAX_TOKENS,
            "generator.max_turns": asked.turns,
            "generator.sampling_params.logprobs": 1,
            "generator.sampling_params.max_generate_length": 2048,
            "generator.step_wise_trajectories": "false",
            "trainer.fully_async.max_staleness_steps": 1,
            "trainer.fully_async.num_parallel_generation_workers": 2 * asked.groups,
            "trainer.fully_async.simulate_training_step_seconds": asked.step_s,
            "trainer.max_prompt_length": 2048,
        },
    )


def main(asked, folder: Path) -> dict:
    class Experiment(skyrl_experiment.WithoutGpu, BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            if asked.side == "skyrl":
                return super().get_generator(cfg, tokenizer, inference_engine_client)
            return skyrl.generator(
                cfg.generator,
                inference_engine_client,
                run_id=asked.run_id,
                agent="benchmarks.overhead.bash_agent:BashAgent",
            )

    skyrl_gym.register(id="shell", entry_point=ShellEnv)
    skyrl_experiment.run(Experiment, configuration(asked, folder))
    stepped = skyrl_experiment.stepped
    return {
        "steps": len(stepped),
        "rollouts": sum(len(step["sequences"]) for step in stepped),
        "right": sum(float(step["rewards"].sum()) for step in stepped),
        "trained": sum(int(step["loss_mask"].sum()) for step in stepped),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="skyrl-") as name:
        print(json.dumps(main(SimpleNamespace(**json.loads(sys.argv[1])), Path(name))))
