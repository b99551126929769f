"""slime's own rollout functions over Perdure's hooks, named as its launcher names them. Prints JSON.

    python tests/real/trainers/slime_rollouts.py PORT

Of three groups, the first has no signal, the second fills the step, and the third is aborted. SGLang's
router, below slime's own HTTP client, is played at PORT.
"""

# mypy: ignore-errors

import asyncio
import itertools
import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import tiny_model
from slime.observability.rollout_data_utils import load_debug_rollout_data, save_debug_rollout_data
from slime.rollout import sglang_rollout
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.http_utils import init_http_client
from slime.utils.misc import load_function
from slime.utils.types import Sample

GROUPS = (
    ("tests/add", "tests/add"),
    ("tests/add", "tests/leave-it"),
    ("tests/add-slowly", "tests/add-slowly"),
)


def arguments(folder: Path, port: int) -> Namespace:
    return Namespace(
        perdure={
            "run_id": "slime",
            "agent": "tests.loop_agent:LoopAgent",
            "agent_budget_s": 300,
        },
        custom_generate_function_path="perdure.integrations.slime.generate",
        custom_reward_post_process_path="perdure.integrations.slime.rewards",
        dynamic_sampling_filter_path="perdure.integrations.slime.has_signal",
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        rollout_global_dataset=True,
        rollout_batch_size=1,
        over_sampling_batch_size=1,
        n_samples_per_prompt=2,
        rollout_temperature=0.7,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=512,
        rollout_max_context_len=8000,
        rollout_stop=None,
        rollout_stop_token_ids=[248046],
        rollout_skip_special_tokens=False,
        eval_max_context_len=8000,
        eval_max_prompt_len=None,
        eval_reward_key=None,
        reward_key=None,
        eval_datasets=[
            EvalDatasetConfig(
                name="held-out",
                path=str(folder / "eval.jsonl"),
                input_key="prompt",
                label_key="label",
                metadata_key="metadata",
                n_samples_per_eval_prompt=1,
                temperature=0.0,
                top_p=1.0,
                top_k=-1,
                max_response_len=512,
            )
        ],
        multimodal_keys=None,
        apply_chat_template=False,
        apply_chat_template_kwargs=None,
        group_rm=False,
        custom_rm_path=None,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        hf_checkpoint=tiny_model.save(folder),
        sglang_server_concurrency=8,
        sglang_dp_size=1,
        sglang_router_ip="127.0.0.1",
        sglang_router_port=port,
        use_distributed_post=False,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=False,
    )


class Source:
    """A data source. The third group is begun with the second."""

    def __init__(self) -> None:
        self.given = 0

    def get_samples(self, _: int) -> list[list[Sample]]:
        numbers = [0] if self.given == 0 else [1, 2]
        self.given += len(numbers)
        return [
            [
                Sample(
                    index=2 * number + n,
                    group_index=number,
                    prompt="Fix it.",
                    metadata={"instance": instance},
                )
                for n, instance in enumerate(GROUPS[number])
            ]
            for number in numbers
        ]


async def main(port: str) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        row = {"prompt": "Fix it.", "label": "", "metadata": {"instance": "tests/add"}}
        (folder / "eval.jsonl").write_text(json.dumps(row))
        args = arguments(folder, int(port))
        init_http_client(args)
        set_current_rollout_id(4)
        state = sglang_rollout.GenerateState(args)
        ended = []
        submit = state.submit_generate_tasks

        def submitted(groups):
            submit(groups)
            ended.extend(state.pendings)

        state.submit_generate_tasks = submitted
        out, left = await sglang_rollout.generate_rollout_async(args, 4, Source().get_samples)
        aborted = [
            sample
            for task in ended
            for made in task.result()
            for sample in (made if isinstance(made, list) else [made])
            if sample.status is Sample.Status.ABORTED
        ]
        evaluated, _ = await sglang_rollout.eval_rollout(args, 4)
        (group,) = out.samples
        flat = list(itertools.chain.from_iterable(group))
        dump = str(folder / "rollout_dumps/rollout_{rollout_id}.pt")
        save_debug_rollout_data(dump, flat, rollout_id=4, evaluation=False)
        save_debug_rollout_data(dump, evaluated.data, rollout_id=4, evaluation=True)
        read = load_debug_rollout_data(dump, rollout_id=4)
        read_eval = load_debug_rollout_data(dump, rollout_id="eval_4")
    raw, advantages = load_function(args.custom_reward_post_process_path)(args, flat)
    return {
        "raw": raw,
        "advantages": advantages,
        "trained": [_trained(sample) for sample in flat],
        "lengths": [
            [len(sample.loss_mask), len(sample.rollout_log_probs), sample.response_length]
            for sample in flat
        ],
        "dropped": out.metrics,
        "aborted": [[one.group_index, one.remove_sample, one.reward] for one in aborted],
        "left": len(left),
        "dumped": [one.to_dict() for one in flat] == [one.to_dict() for one in read],
        "read_again": load_function(args.custom_reward_post_process_path)(args, read)[1],
        "read_evaluation": [one.metadata["rollout_reward"] for one in read_eval],
        "evaluated": evaluated.data["held-out"]["rewards"],
    }


def _trained(sample: Sample) -> list:
    """Ids and logprobs of the tokens that the loss takes."""
    ids = sample.tokens[-sample.response_length :]
    rows = zip(ids, sample.rollout_log_probs, sample.loss_mask, strict=True)
    taken = [(token, logprob) for token, logprob, trained in rows if trained]
    return list(zip(*taken, strict=True))


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:])), default=str))
