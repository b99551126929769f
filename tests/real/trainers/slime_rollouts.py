"""slime's own rollout functions over Perdure's hooks, named as its launcher names them. Prints JSON.

    python tests/real/trainers/slime_rollouts.py PORT

Of three groups, the first has no signal, the second fills the step, and the third is aborted. SGLang's
router, below slime's own HTTP client, is played at PORT.
"""

# mypy: ignore-errors

import asyncio
import itertools
import json
import re
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

import absent
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


LINE = """
    --custom-generate-function-path perdure.integrations.slime.generate
    --prompt-data {rows}
    --input-key prompt
    --label-key label
    --metadata-key metadata
    --rollout-batch-size 1
    --n-samples-per-prompt 2
    --rollout-max-context-len 8000
    --rollout-max-response-len 512
    --rollout-stop-token-ids 248046 248044
    --save-debug-rollout-data {dumps}
"""
"""Document 002's launcher line, with smaller numbers and the module's name."""
MORE = "--num-rollout 1 --rollout-num-gpus 1 --rollout-temperature 0.7 --disable-grpo-std-normalization"


def arguments(folder: Path, port: int) -> Namespace:
    """As slime's own parser and checks make them of document 002's line and the page's lines. SGLang's and
    Megatron's arguments are given."""
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "", "label": "", "metadata": {}}))
    (folder / "perdure.yaml").write_text(
        json.dumps({"perdure": {"run_id": "slime", "agent": "tests.loop_agent:LoopAgent"}})
    )
    page = re.findall(r"^    (--\S+) (\S+)$", Path("docs/train.md").read_text(), re.MULTILINE)
    dumps = folder / "rollout_dumps/rollout_{rollout_id}.pt"
    words = LINE.format(rows=folder / "rows.jsonl", dumps=dumps).split() + MORE.split()
    for name, value in page:
        words += [name, str(folder / value) if value == "perdure.yaml" else value]
    absent.stand_in(absent.SLIME)
    from slime.utils import arguments as real

    del sys.meta_path[0]
    parser = ArgumentParser(allow_abbrev=False)
    real.get_slime_extra_args_provider()(parser)
    args = parser.parse_args(words)
    vars(args).update(vars(real._pre_parse_mode()), hf_checkpoint=tiny_model.save(folder))
    real.slime_validate_args(args)
    args.perdure["agent_budget_s"] = 300
    args.eval_datasets = [
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
    ]
    args.sglang_server_concurrency, args.sglang_dp_size = 8, 1
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", port
    return args


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
        dump = args.save_debug_rollout_data
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
