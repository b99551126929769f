"""TRL's GRPOTrainer over its own vLLM and Perdure's rollouts, for two optimizer steps on a CPU. Prints JSON.

    python tests/real/trainers/trl_vllm.py MODE URL HOME PAGE

MODE `server`: URL is a server of TRL's client, which sends its weights for real except by NCCL. MODE
`colocate`: vLLM in this process is a stand-in, whose engine samples one call a step from a vLLM-like
server at URL. PAGE: a file with what the page prints, which is run.
"""

# mypy: ignore-errors

import absent

absent.stand_in(("vllm",))

import json  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import httpx  # noqa: E402
import tiny_model  # noqa: E402
import torch  # noqa: E402
import vllm  # noqa: E402
import vllm.sampling_params  # noqa: E402

MODE, URL, HOME, PAGE = sys.argv[1:]
VOCABULARY = 151_936
STEPS, SIBLINGS = 2, 2
AWAKE = {"weights", "kv_cache"}
trained, made = [], []


class LLM:
    """vLLM's `LLM` and its engine. Notes in which threads it samples, and whether it is asleep."""

    def __init__(self, **options):
        assert options["logprobs_mode"] == "processed_logprobs"
        self.updates, self.most, self.threads, self.awake, self.calls = 0, 0, set(), set(AWAKE), {}
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.llm_engine, self.model_executor = self, SimpleNamespace(driver_worker=runner)
        made.append(self)

    def load_weights(self, weights):
        assert "weights" in self.awake

    def reset_prefix_cache(self):
        self.updates += 1

    def wake_up(self, tags):
        self.awake |= set(tags)

    def sleep(self, level):
        assert (level, self.calls) == (2, {})
        self.awake.clear()

    def add_request(self, request_id, prompt, params):
        self.calls[request_id] = prompt["prompt_token_ids"], params
        self.most = max(self.most, len(self.calls))

    def abort_request(self, request_ids):
        for name in request_ids:
            self.calls.pop(name)

    def step(self):
        """The call that has waited longest is finished, the others run on."""
        assert self.awake == AWAKE
        self.threads.add(threading.current_thread())
        name = next(iter(self.calls))
        ids, params = self.calls.pop(name)
        assert (params.pop("logprobs"), params.pop("output_kind")) == (0, "whole")
        asked = {"token_ids": ids, "sampling_params": {**params, "logprobs": 1}}
        answer = httpx.post(f"{URL}/inference/v1/generate", json=asked, trust_env=False).json()
        (choice,) = answer["choices"]
        entries = choice["logprobs"]["content"]
        logprobs = [{one["token_id"]: SimpleNamespace(logprob=one["logprob"])} for one in entries]
        output = SimpleNamespace(**{**choice, "logprobs": logprobs})
        return [SimpleNamespace(request_id=name, finished=True, outputs=[output])]


vllm.__version__ = "0.31.0"  # the newest that TRL 1.16.0 supports
vllm.LLM = LLM
vllm.sampling_params.SamplingParams = SimpleNamespace(from_optional=dict)
vllm.sampling_params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="whole")

from datasets import Dataset  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.generation.vllm_client import VLLMClient  # noqa: E402

from perdure.integrations import trl  # noqa: E402

VLLMClient.init_communicator = lambda client, device: None  # its NCCL needs a GPU


class Watched(GRPOTrainer):
    """Notes what its loss is computed from."""

    def _compute_loss(self, model, inputs):
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        for n, taken in enumerate(mask):
            names = ("completion_ids", "sampling_per_token_logps")
            trained.append([inputs[name][n][taken].tolist() for name in names])
        return super()._compute_loss(model, inputs)


def main() -> dict:
    torch.set_num_threads(1)
    folder = tiny_model.save(Path(HOME, "model"))
    sizes = {"vocab_size": VOCABULARY, "num_key_value_heads": 1, "head_dim": 8}
    config = AutoConfig.from_pretrained(folder, **sizes, intermediate_size=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    config = GRPOConfig(
        str(Path(HOME, "out")),
        max_steps=STEPS,
        per_device_train_batch_size=SIBLINGS,
        num_generations=SIBLINGS,
        temperature=0.8,
        max_completion_length=512,
        use_vllm=True,
        vllm_mode=MODE,
        vllm_server_base_url=URL,
        vllm_enable_sleep_mode=MODE == "colocate",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    names = {"Dataset": Dataset, "GRPOTrainer": Watched, "trl": trl}
    exec(Path(PAGE).read_text(), names | {"model": folder, "config": config})
    main_thread = {threading.main_thread()}
    colocated = [[one.threads == main_thread, one.most, not one.awake] for one in made]
    updates = sum(one.updates for one in made)
    return {"trained": trained, "updates": updates, "colocated": colocated}


if __name__ == "__main__":
    print(json.dumps(main()))
