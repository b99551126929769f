"""Runs one group through the rollouter without a trainer, to check the rest of the setup.

    python -m perdure.integrations.torchtitan.smoke --instance first-steps/h11-0.14.0 --engine http://10.0.0.7:8000

A vLLM server replaces the trainer's generator. Prints the samples that the trainer would pack, as JSON.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from torchtitan.experiments.rl.components.training_sample_builder import TrainingSampleBuilder
from torchtitan.experiments.rl.rollout.types import GenerateFn
from torchtitan.experiments.rl.types import Completion

from perdure.integrations.torchtitan.rollouter import PerdureRollouter, RolloutFields


@dataclass
class Sampling:
    """The fields of TorchTitan's `SamplingConfig`, whose module needs a GPU."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 4096
    seed: int | None = None
    stop_token_ids: list[int] | None = None


def from_vllm(client: httpx.AsyncClient, url: str, version: int = 0) -> GenerateFn:
    """A `generate_fn` over a vLLM server with `--enable-scale-out`."""

    async def generate(
        prompt_token_ids: list[int],
        *,
        request_id: str,
        routing_session_id: str | None = None,
        sampling_config: Any = None,
    ) -> Completion:
        told = {name: v for name, v in vars(sampling_config).items() if v is not None}
        body = {
            "model": "policy",
            "request_id": request_id,
            "token_ids": prompt_token_ids,
            "sampling_params": {**told, "logprobs": 1, "skip_special_tokens": False},
        }
        answer = await client.post(f"{url}/inference/v1/generate", json=body)
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        return Completion(
            min_policy_version=version,
            max_policy_version=version,
            request_id=request_id,
            token_ids=choice["token_ids"],
            token_logprobs=[one["logprob"] for one in choice["logprobs"]["content"]],
            finish_reason=choice["finish_reason"],
        )

    return generate


async def smoke(options: argparse.Namespace) -> dict[str, Any]:
    rollouter = PerdureRollouter.Config(
        run_id="smoke",
        rollout=RolloutFields(agent=options.agent, sandbox=options.sandbox),
        engine_host=options.host,
        engine_port=options.port,
    ).build()
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        try:
            group = await rollouter.run_group_rollouts(
                generate_fn=from_vllm(client, options.engine),
                sample=options.instance,
                group_id=0,
                group_size=options.group_size,
                sampling=Sampling(),
            )
        finally:
            await rollouter.close()
    builder = TrainingSampleBuilder.Config(drop_zero_std_reward_groups=False).build()
    samples = builder.build_from_group(rollout_group=group).training_samples
    return {
        "rewards": [rollout.reward for rollout in group.rollouts],
        "advantages": [rollout.advantage for rollout in group.rollouts],
        "turns": [len(rollout.turns) for rollout in group.rollouts],
        "samples": [
            {"tokens": len(one.token_ids), "trained": sum(one.loss_mask)} for one in samples
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perdure.integrations.torchtitan.smoke")
    parser.add_argument("--instance", required=True, help="<dataset>/<instance_id>")
    parser.add_argument("--engine", required=True, help="URL of a vLLM server")
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--agent", default="mini_swe_agent")
    parser.add_argument("--sandbox", default="bubblewrap")
    parser.add_argument("--host", default="", help="where gateways reach this process")
    parser.add_argument("--port", type=int, default=0)
    with contextlib.suppress(KeyboardInterrupt):
        print(json.dumps(asyncio.run(smoke(parser.parse_args(arguments)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
