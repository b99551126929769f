"""SkyRL's interface and its own checks over Perdure's generator. Prints JSON.

    python tests/real/trainers/skyrl_generator.py URL

SkyRL's own client samples from a vLLM-like server at URL, which gets new weights all the time: it is paused,
the client counts a version, and it goes on.
"""

# mypy: ignore-errors

import typing

import typing_extensions

typing.TypedDict = typing_extensions.TypedDict  # pydantic wants this one below Python 3.12

import asyncio  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from types import SimpleNamespace  # noqa: E402

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import (  # noqa: E402
    RemoteInferenceClient,
)
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
UPDATE_S = 0.5


async def train(client: RemoteInferenceClient) -> None:
    while True:
        await client.pause_generation()
        client.increment_weight_version()
        await client.resume_generation()
        await asyncio.sleep(UPDATE_S)


async def main(url: str) -> dict:
    decoder = SimpleNamespace(batch_decode=lambda rows: [""] * len(rows))
    client = RemoteInferenceClient(url, [url], 1, model_name="policy", tokenizer=decoder)
    generator = skyrl.generator(
        SimpleNamespace(step_wise_trajectories=True),
        client,
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
    training = asyncio.create_task(train(client))
    output = await generator.generate(batch)
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    await client.teardown()
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
        "updates": client.weight_version,
    }


def _trained(output: GeneratorOutput) -> list:
    """Of each row, the ids and logprobs of the tokens that the loss takes."""
    names = ("response_ids", "rollout_logprobs", "loss_masks")
    return [
        [list(itertools.compress(values, mask)) for values in (ids, logprobs)]
        for ids, logprobs, mask in zip(*(output[name] for name in names), strict=True)
    ]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:])), default=str))
