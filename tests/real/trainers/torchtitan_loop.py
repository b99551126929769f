"""TorchTitan's own loops over Perdure's rollouter, on a real stack, without a GPU.

    python tests/real/trainers/torchtitan_loop.py ROWS FIXES IDLES OPTION...

The controller's data, rollout and batcher loops run as they are, up to a packed batch. Its generator is
one of two vLLM-like servers: `FIXES` samples for the first sibling of each group, `IDLES` for the others.
Trainer, Monarch and TorchStore are absent. OPTIONs are those of TorchTitan's launcher, which are parsed.
Prints JSON.
"""

# mypy: ignore-errors

import absent

absent.stand_in(absent.TORCHTITAN)

import asyncio  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import httpx  # noqa: E402
from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.experiments.rl.components.batcher import BatchConfig, Batcher  # noqa: E402
from torchtitan.experiments.rl.controller import AsyncLoopConfig, Controller  # noqa: E402
from torchtitan.experiments.rl.observability.metrics import (  # noqa: E402
    Mean,
    Metric,
    MetricsProcessor,
)
from torchtitan.experiments.rl.rollout_recorder import RolloutSampleRecorder  # noqa: E402

from perdure.engines.health_check import CANARY_PROMPTS  # noqa: E402
from perdure.integrations.torchtitan import config_registry  # noqa: E402
from perdure.integrations.torchtitan.instances import Instances  # noqa: E402
from perdure.integrations.torchtitan.rollouter import PerdureRollouter, RolloutFields  # noqa: E402
from perdure.integrations.torchtitan.smoke import Sampling, from_vllm  # noqa: E402

VERSION = 3
GROUP_SIZE = 2


def generator(client, fixes, idles):
    """A `generate_fn`; who asks first in a group of two gets the engine that fixes."""
    engines = [from_vllm(client, url, VERSION) for url in (fixes, idles)]
    seen, calls = [], []

    async def generate(prompt_token_ids, *, request_id, routing_session_id=None, sampling_config):
        if _is_turn(prompt_token_ids) and routing_session_id not in seen:
            seen.append(routing_session_id)
        at = seen.index(routing_session_id) if routing_session_id in seen else 0
        completion = await engines[at % GROUP_SIZE](
            prompt_token_ids, request_id=request_id, sampling_config=sampling_config
        )
        completion.metrics.append(Metric("generator/tokens", Mean(len(completion.token_ids))))
        calls.append((list(prompt_token_ids), completion, dict(vars(sampling_config))))
        return completion

    return generate, calls


async def main(rows, fixes, idles, *options):
    recipe = ConfigManager().parse_args(list(options)).rollouter
    dump = tempfile.mkdtemp()
    config = AsyncLoopConfig(
        num_prompts_per_train_step=1,
        num_samples_per_prompt=GROUP_SIZE,
        target_offpolicy_steps=0,
        batcher=Batcher.Config(batch=BatchConfig(local_batch_size=1, seq_len=8192)),
    )
    rollouter = PerdureRollouter.Config(
        train_dataset=Instances.Config(path=rows, shuffle=False),
        run_id="titan",
        rollout=RolloutFields(agent="tests.loop_agent:LoopAgent", agent_budget_s=300),
    ).build()
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        generate_fn, calls = generator(client, fixes, idles)
        controller = SimpleNamespace(
            config=SimpleNamespace(async_loop=config),
            _rollouter=rollouter,
            _sampling=Sampling(temperature=0.8, top_p=0.9, max_tokens=512, seed=7),
            renderer=None,
            rollout_recorder=RolloutSampleRecorder.Config().build(dump_dir=dump),
        )
        buffer = config.group_buffer.build(
            max_active_rollout_groups=config.max_active_rollout_groups,
            window_size=config.window_size,
        )
        queue = asyncio.Queue(maxsize=1)
        groups = []
        run_group = rollouter.run_group_rollouts

        async def noted(**asked):
            groups.append(await run_group(**asked))
            return groups[-1]

        rollouter.run_group_rollouts = noted
        loops = [
            Controller._data_input_loop(controller, buffer),
            Controller._rollout_loop(controller, group_buffer=buffer, generate_fn=generate_fn),
            Controller._batcher_loop(
                controller,
                group_buffer=buffer,
                training_sample_builder=config.training_sample_builder.build(),
                batcher=config.batcher.build(num_prompts_per_train_step=1, dp_degree=1, pad_id=0),
                training_batch_queue=queue,
            ),
        ]
        tasks = [asyncio.create_task(loop) for loop in loops]
        async with asyncio.timeout(1200):
            batch = await queue.get()
        await buffer.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await rollouter.close()
    (microbatch,) = batch.microbatches[0]
    logged = MetricsProcessor._aggregate_metrics(batch.metrics)
    lines = Path(dump, "rollout_samples.jsonl").read_text().splitlines()
    recorded = [json.loads(line) for line in lines]
    sampled = [(c.token_ids, c.token_logprobs) for prompt, c, _ in calls if _is_turn(prompt)]
    return {
        "sampled": sampled,
        "sampling": [said for prompt, _, said in calls if _is_turn(prompt)][-1],
        "told": [turn.sampling for made in groups[0].rollouts for turn in made.turns],
        "trained": _trained(microbatch),
        "advantages": sorted(set(microbatch.advantages.flatten().tolist())),
        "min_policy_versions": batch.min_policy_versions,
        "metrics": logged,
        "spoken": [len(one["turns"]) for one in recorded],
        "recipes": _recipes(options),
        "recipe": [
            type(recipe).__qualname__,
            recipe.run_id,
            recipe.rollout.agent,
            recipe.rollout.sandbox,
        ],
    }


def _recipes(options):
    """The size of each model of the registry, as TorchTitan's launcher finds it."""
    place = options.index("--config") + 1
    names = [name for name in vars(config_registry) if name.startswith("rl_grpo_")]
    found = [
        ConfigManager().parse_args([*options[:place], name, *options[place + 1 :]])
        for name in names
    ]
    return sorted(one.model_spec.flavor for one in found)


def _is_turn(prompt):
    """Not a probe of the gateway's, which the generator answers too."""
    return tuple(prompt) not in CANARY_PROMPTS


def _trained(batch):
    """Ids and generator logprobs of the tokens that the loss takes."""
    taken = batch.loss_mask.flatten().bool()
    ids = batch.labels.flatten()[taken].tolist()
    return [ids, batch.generator_logprobs.flatten()[taken].tolist()]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:])), default=str))
