"""SkyRL's interface and its own checks over Perdure's generator. Prints JSON."""

# mypy: ignore-errors

import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic wants this one below Python 3.12

import asyncio  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
from types import SimpleNamespace  # noqa: E402

from skyrl.train.generators.base import (  # noqa: E402
    BatchMetadata,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
)
from skyrl.train.generators.utils import get_metrics_from_generator_output  # noqa: E402
from skyrl.train.utils.trainer_utils import validate_generator_output  # noqa: E402

from perdure.integrations import skyrl  # noqa: E402

INSTANCES = ("tests/add", "tests/leave-it")


async def main() -> dict:
    generator = skyrl.generator(
        SimpleNamespace(step_wise_trajectories=True),
        run_id="skyrl",
        agent="tests.loop_agent:LoopAgent",
        agent_budget_s=300,
    )
    order = [TrajectoryID("b", 0), TrajectoryID("a", 1)]
    batch = {
        "prompts": [[], []],
        "env_classes": ["perdure"] * 2,
        "env_extras": [{"instance": one} for one in INSTANCES],
        "sampling_params": {"temperature": 0.8, "max_generate_length": 512},
        "trajectory_ids": order,
        "batch_metadata": BatchMetadata(global_step=2, training_phase="train"),
    }
    output = await generator.generate(batch)
    validate_generator_output(len(order), output, step_wise=True)
    ids = output["trajectory_ids"]
    metrics = get_metrics_from_generator_output(output, [one.instance_id for one in ids])
    return {
        "is_generator": isinstance(generator, GeneratorInterface),
        "fields": sorted(set(GeneratorOutput.__annotations__) ^ set(output)),
        "order": [[one.instance_id, one.repetition_id] for one in ids],
        "rewards": [row[-1] for row in output["rewards"]],
        "trained": _trained(output),
        "metrics": dict(metrics),
        "counts": output["rollout_metrics"],
    }


def _trained(output: GeneratorOutput) -> list:
    """Of each row, the ids and logprobs of the tokens that the loss takes."""
    names = ("response_ids", "rollout_logprobs", "loss_masks")
    return [
        [list(itertools.compress(values, mask)) for values in (ids, logprobs)]
        for ids, logprobs, mask in zip(*(output[name] for name in names), strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main()), default=str))
