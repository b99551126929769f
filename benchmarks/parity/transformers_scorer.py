"""Scores recorded ids with transformers: `python transformers_scorer.py MODEL DTYPE DEVICE < REQUEST > ANSWER`.

It runs in an environment with transformers, such as vLLM's own; nothing in Perdure imports it. REQUEST
and ANSWER are JSON objects; `scorer_process.py` describes them.
"""

# mypy: ignore-errors

import contextlib
import json
import sys
import time

import torch
import transformers


def scored(model, turn):
    """For each recorded id: its logprob, the most likely id there, and the difference of their logits."""
    prompt, completion = turn["prompt"], torch.tensor(turn["completion"], device=model.device)
    ids = torch.tensor([[*prompt, *turn["completion"]]], device=model.device)
    found = model(ids, logits_to_keep=len(completion) + 1).logits[0, :-1].float()
    logits = (
        penalised(found, prompt, completion, turn["sampling"]) / turn["sampling"]["temperature"]
    )
    best, own = logits.max(-1), logits.gather(1, completion[:, None])[:, 0]
    left = narrowed(logits, turn["sampling"])
    return {
        "logprobs": (left.gather(1, completion[:, None])[:, 0] - left.logsumexp(-1)).tolist(),
        "likeliest": best.indices.tolist(),
        "behind": (best.values - own).tolist(),
    }


def penalised(logits, prompt, completion, sampling):
    """Penalties as vLLM documents them: repetition counts the prompt, presence and frequency do not."""
    counts = torch.zeros_like(logits)
    for at in range(1, len(completion)):
        counts[at] = counts[at - 1]
        counts[at, completion[at - 1]] += 1
    seen = counts > 0
    seen[:, torch.tensor(prompt, device=logits.device)] = True
    by = sampling.get("repetition_penalty", 1.0)
    logits = torch.where(seen, torch.where(logits > 0, logits / by, logits * by), logits)
    logits = logits - sampling.get("frequency_penalty", 0.0) * counts
    return logits - sampling.get("presence_penalty", 0.0) * (counts > 0)


def narrowed(logits, sampling):
    """Logits without the tokens that top_p removes: the least likely ones, which sum up to 1 - top_p."""
    top_p = sampling.get("top_p", 1.0)
    if top_p >= 1.0:
        return logits
    rising, order = logits.sort(-1)
    removed = rising.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[:, -1] = False
    return logits.masked_fill(removed.scatter(1, order, removed), float("-inf"))


def generated(model, prompts, tokens):
    """Seconds of one greedy batch with left-padded prompts, after a warm-up batch."""
    longest = max(map(len, prompts))
    filler = model.config.pad_token_id or 0
    ids = [[filler] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    asked = {
        "input_ids": torch.tensor(ids, device=model.device),
        "attention_mask": torch.tensor(mask, device=model.device),
        "do_sample": False,
        "pad_token_id": filler,
    }
    model.generate(**asked, max_new_tokens=1)
    synchronize(model)
    began = time.perf_counter()
    model.generate(**asked, max_new_tokens=tokens, min_new_tokens=tokens)
    synchronize(model)
    return time.perf_counter() - began


def synchronize(model):
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def main():
    name, dtype, device = sys.argv[1:]
    torch.set_num_threads(1)  # as many threads as the engine has on CPU
    with contextlib.redirect_stdout(
        sys.stderr
    ):  # libraries print too, which must not mix with the answer
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, dtype))
        model.to(device).eval()
        asked = json.load(sys.stdin)
        with torch.inference_mode():
            answer = {
                "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
                "transformers": transformers.__version__,
                "turns": [scored(model, turn) for turn in asked["turns"]],
                "generate_s": [
                    generated(model, batch["prompts"], batch["tokens"])
                    for batch in asked["batches"]
                ],
            }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
