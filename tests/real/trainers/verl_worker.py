"""verl's own agent loop worker over Perdure's agent loop, up to what it puts in its queue. Prints JSON.

    python tests/real/trainers/verl_worker.py LOOPS CLIENT URL     # the file of `agent_loop_config_path`

Configuration, registry, worker, postprocessing, load balancer and CLIENT (a class of
`verl.workers.rollout.llm_server`) are verl's. Below that, two replicas are played: they sample from a
scripted engine at URL. Ray is not started; the queue is a list.
"""

# mypy: ignore-errors

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import tiny_model
from hydra import compose, initialize_config_module
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.router import GlobalRequestLoadBalancer

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


class Handle:
    """A Ray actor's handle on an object of this process."""

    def __init__(self, actor):
        self._actor = actor

    def __getattr__(self, name):
        method = getattr(self._actor, name)

        async def remote(*args, **options):
            found = method(*args, **options)
            return await found if asyncio.iscoroutine(found) else found

        return SimpleNamespace(remote=lambda *a, **o: asyncio.ensure_future(remote(*a, **o)))


class Replica:
    """Plays `vLLMHttpServer` of verl 0.9.1 (`vllm_rollout/vllm_async_server.py`), which gets new weights at
    bad moments: it aborts every third call of a session after 3 tokens and goes on with the next version."""

    def __init__(self, client, url):
        self.client, self.url = client, url
        self.global_steps = 5
        self.calls = []

    async def generate(self, prompt_ids, sampling_params, request_id, image_data, video_data):
        params = dict(sampling_params)
        assert params.pop("logprobs") is True
        is_turn = params["max_tokens"] > 1  # not a probe of the gateway's
        self.calls += [request_id] * is_turn
        aborts = is_turn and len(self.calls) % 3 == 0
        if aborts:
            params["max_tokens"] = 3
        body = {"token_ids": prompt_ids, "sampling_params": {**params, "logprobs": 1}}
        answer = await self.client.post(f"{self.url}/inference/v1/generate", json=body)
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        said = {"global_steps": self.global_steps}
        self.global_steps += aborts
        return TokenOutput(
            token_ids=choice["token_ids"],
            log_probs=[one["logprob"] for one in choice["logprobs"]["content"]],
            stop_reason="aborted" if aborts else "completed",
            num_preempted=int(is_turn),
            extra_fields=said,
        )


class Balancer(GlobalRequestLoadBalancer):
    """Notes which server gets which session's calls."""

    def __init__(self, servers):
        super().__init__(servers)
        self.given = {}

    def acquire_server(self, request_id):
        name, server = super().acquire_server(request_id)
        self.given.setdefault(request_id, set()).add(name)
        return name, server


async def main(loops: str, client_class: str, url: str) -> dict:
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
        http = httpx.AsyncClient(trust_env=False, timeout=None)
        replicas = [Replica(http, url) for _ in range(2)]
        balancer = Balancer({f"replica-{n}": Handle(one) for n, one in enumerate(replicas)})
        worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class(
            config, llm_client=getattr(llm_server, client_class)(config, Handle(balancer))
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
        "preempted": [field["metrics"]["num_preempted"] for _, field, _ in put],
        "calls": sum(len(one.calls) for one in replicas),
        "updates": sum(one.global_steps - 5 for one in replicas),
        "servers": [
            len(names) for session, names in balancer.given.items() if "probe" not in session
        ],
        "extra": sorted(np.unique([name for _, f, _ in put for name in f["extra_fields"]])),
    }


def _trained(field) -> list:
    """Ids and logprobs of the tokens that the loss takes."""
    taken = field["response_mask"].bool()
    return [field["responses"][taken].tolist(), field["rollout_log_probs"][taken].tolist()]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:])), default=str))
