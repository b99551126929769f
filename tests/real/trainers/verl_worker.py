"""verl's own agent loop worker over Perdure's agent loop, up to what it puts in its queue. Prints JSON.

    python tests/real/trainers/verl_worker.py LOOPS      # the file of `agent_loop_config_path`

Configuration, registry, worker, postprocessing: verl's. Ray is not started; the queue is a list.
"""

# mypy: ignore-errors

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tiny_model
from hydra import compose, initialize_config_module
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.v1 import agent_loop_tq

INSTANCES = ("tests/add", "tests/leave-it")


def configuration(folder: Path, loops: str):
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={tiny_model.save(folder)}",
                f"{rollout}.name=vllm",
                f"{rollout}.n=2",
                f"{rollout}.temperature=0.8",
                f"{rollout}.calculate_log_probs=true",
                f"{rollout}.agent.default_agent_loop=perdure",
                f"{rollout}.agent.agent_loop_config_path={loops}",
            ],
        )


async def main(loops: str) -> dict:
    put, states = [], []

    async def batch(keys, fields, tags, partition_id):
        put.extend(zip(keys, fields, tags, strict=True))

    async def one(key, partition_id, tag):
        states.append([key, tag["status"]])

    agent_loop_tq.tq = SimpleNamespace(
        init=lambda: None, async_kv_put=one, async_kv_batch_put=batch
    )
    agent_loop_tq.list_of_dict_to_tensordict = list
    with tempfile.TemporaryDirectory() as name:
        config = configuration(Path(name), loops)
        worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class(
            config, llm_client=None
        )
    rows = TensorDict(
        {
            "uid": NonTensorStack("one", "two"),
            "index": NonTensorStack(0, 1),
            "global_steps": NonTensorData(5),
            "raw_prompt": NonTensorStack([], []),
            "extra_info": NonTensorStack(*({"instance": found} for found in INSTANCES)),
        },
        batch_size=2,
    )
    await worker.generate_sequences(rows)
    await asyncio.gather(*worker.background_tasks)
    assert all(status != "failure" for _, status in states)  # its log says why
    return {
        "keys": sorted(key for key, _, _ in put),
        "states": states,
        "scores": {key: float(field["rm_scores"].sum()) for key, field, _ in put},
        "trained": [_trained(field) for _, field, _ in put],
        "tags": [tag for _, _, tag in put],
        "extra": sorted(np.unique([name for _, f, _ in put for name in f["extra_fields"]])),
    }


def _trained(field) -> list:
    """Ids and logprobs of the tokens that the loss takes."""
    taken = field["response_mask"].bool()
    return [field["responses"][taken].tolist(), field["rollout_log_probs"][taken].tolist()]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1])), default=str))
