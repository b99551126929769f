"""SkyRL's own experiment over Perdure's generator, for one step on a host without a GPU.

    python tests/real/trainers/skyrl_main.py FOLDER true|false URL      # generator.step_wise_trajectories

The experiment is the page's, in FOLDER/page.py. Its inference server is a vLLM-like one at URL. Prints JSON.
"""

# mypy: ignore-errors

import json
import sys
from pathlib import Path

import skyrl_experiment
import tiny_model
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.entrypoints.main_base import BasePPOExp

from perdure.integrations import skyrl

INSTANCES = ("tests/add", "tests/leave-it")


def configuration(folder: Path, step_wise: str, url: str) -> SkyRLTrainConfig:
    said = [{"role": "user", "content": "see the instance"}]
    return skyrl_experiment.configuration(
        folder,
        [{"prompt": said, "instance": one} for one in INSTANCES],
        url,
        model=tiny_model.save(folder / "model"),
        groups=2,
        samples=2,
        steps=1,
        options={
            "environment.env_class": "perdure",
            "generator.sampling_params.max_generate_length": 512,
            "generator.sampling_params.temperature": 0.8,
            "generator.step_wise_trajectories": step_wise,
            "trainer.fully_async.num_parallel_generation_workers": 2,
            "trainer.fully_async.simulate_training_step_seconds": 0,
        },
    )


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

    class Experiment(skyrl_experiment.WithoutGpu, names["Exp"]):
        pass

    experiment = skyrl_experiment.run(Experiment, configuration(folder, step_wise, url))
    (step,) = skyrl_experiment.stepped
    return {
        "step": experiment.trainer.global_step,
        "rows": len(step["sequences"]),
        "trained": _trained(step),
        "rewards": sorted(float(row.sum()) for row in step["rewards"]),
        "uids": sorted(step.metadata["uids"]),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:]), default=str))
