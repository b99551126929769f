"""verifiers' own environment machinery over Perdure's, found by the name of a module. Prints JSON.

python tests/real/trainers/verifiers_episodes.py FOLDER URL      # of perdure_env.py; of prime-rl's vLLM
"""

# mypy: ignore-errors

import asyncio
import itertools
import json
import sys
import tempfile
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

INSTANCES = ("tests/add", "tests/leave-it", "tests/absent")


async def main(modules: str, url: str) -> dict:
    sys.path.insert(0, modules)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        rows.write_text("\n".join(json.dumps({"instance": one}) for one in INSTANCES))
        config = {
            "taskset": {"id": "perdure_env", "path": str(rows)},
            "run_id": "verifiers",
            "rollout": {"agent": "tests.loop_agent:LoopAgent", "agent_budget_s": 300},
        }
        env = load_environment(resolve_env_config(config))
        tasks = list(env.taskset)
    ctx = ModelContext(
        model="policy",
        client=vf.TrainClientConfig(base_url=f"{url}/v1"),
        sampling=vf.SamplingConfig(temperature=0.8, max_tokens=512),
    )
    slots = [slot for task in tasks for slot in env.slots(task)]
    episodes = await asyncio.gather(*(env.run_slot(slot, ctx) for slot in slots))
    wire = [vf.Episode.model_validate(one.model_dump()) for one in episodes]
    traces = [one.traces[0] for one in wire]
    return {
        "kind": type(env).__name__,
        "ids": [task.data.id for task in tasks],
        "ok": [one.ok for one in wire],
        "errors": [[error.type for error in one.errors] for one in wire],
        "rewards": [trace.reward for trace in traces],
        "branches": [len(trace.branches) for trace in traces],
        "trained": [_trained(b) for trace in traces for b in trace.branches],
        "temperatures": [sorted({c.sampling.temperature for c in trace.calls}) for trace in traces],
        "roles": [[node.message.role for node in trace.nodes[:3]] for trace in traces],
    }


def _trained(branch) -> list:
    """Ids and logprobs of the tokens that the policy sampled."""
    mask = branch.sampled_mask
    return [list(itertools.compress(row, mask)) for row in (branch.token_ids, branch.logprobs)]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:])), default=str))
