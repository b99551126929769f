"""A trainer's side of weights, by transformers: `python trainer.py MODEL < REQUEST > ANSWER`.

Runs in vLLM's own environment; nothing in Perdure imports it. REQUEST is a JSON list of id lists;
The answer has for each list: the greedy next token, its logprob, the distance to the second best,
and the logprobs of the ids themselves from the second on.
"""

# mypy: ignore-errors

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def scored(model, ids):
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    (best, second), (token, _) = (found.tolist() for found in logprobs[-1].topk(2))
    return {
        "token_id": token,
        "logprob": best,
        "ahead": best - second,
        "prompt_logprobs": [float(logprobs[i - 1, ids[i]]) for i in range(1, len(ids))],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
    json.dump([scored(model, ids) for ids in json.load(sys.stdin)], sys.stdout)
