"""Reads answers with the parsers of vLLM and SGLang: `python oracles.py SGLANG < CASES > READ`.

Runs in vLLM's own environment, SGLANG is a folder with the unpacked package; nothing in Perdure imports it.
CASES: JSON, a list of {parser, text, tools, control}. READ: for each case the calls that vLLM and that
SGLang finds, as [[name, arguments], ...]; null where there is no parser, a text where it failed.
"""

# mypy: ignore-errors

import contextlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

SGLANG = {
    "hermes": "hermes_detector.HermesDetector",
    "qwen3_coder": "qwen3_coder_detector.Qwen3CoderDetector",
    "glm45": "glm4_moe_detector.Glm4MoeDetector",
    "kimi_k2": "kimik2_detector.KimiK2Detector",
    "deepseek_v3": "deepseekv3_detector.DeepSeekV3Detector",
    "deepseek_v31": "deepseekv31_detector.DeepSeekV31Detector",
    "deepseek_v32": "deepseekv32_detector.DeepSeekV32Detector",
    "minimax_m2": "minimax_m2.MinimaxM2Detector",
    "llama3_json": "llama32_detector.Llama32Detector",
    "llama4_pythonic": "pythonic_detector.PythonicDetector",
    "mistral": "mistral_detector.MistralDetector",
}


class Vocabulary:
    """What vLLM's parsers ask of a tokenizer: the ids of control tokens, and text to ids and back."""

    def __init__(self, control):
        self.added = {token: 1000 + at for at, token in enumerate(control)}
        self.back = {number: token for token, number in self.added.items()}
        self.all_special_tokens, self.all_special_ids = list(self.added), list(self.back)
        self.eos_token_id = None

    def get_vocab(self):
        return dict(self.added)

    def get_added_vocab(self):
        return dict(self.added)

    def convert_tokens_to_ids(self, token):
        return self.added.get(token)

    def encode(self, text, **_):
        ids, at = [], 0
        while at < len(text):
            token = next((one for one in self.added if text.startswith(one, at)), None)
            ids.append(self.added[token] if token else 2000 + ord(text[at]))
            at += len(token) if token else 1
        return ids

    def decode(self, ids, **_):
        ids = [ids] if isinstance(ids, int) else ids
        return "".join(self.back.get(one) or chr(one - 2000) for one in ids)


def vllm_reads(case):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    if case["parser"] == "openai":
        return None  # read by another class, which downloads a vocabulary
    try:
        kind = ToolParserManager.get_tool_parser(case["parser"])
    except KeyError:
        return None
    asked = {"role": "user", "content": "hi"}
    request = ChatCompletionRequest(model="m", messages=[asked], tools=case["tools"])
    parser = kind(Vocabulary(case["control"]), request.tools)
    found = parser.extract_tool_calls(case["text"], request)
    return [[call.function.name, json.loads(call.function.arguments)] for call in found.tool_calls]


def sglang_reads(case):
    from importlib import import_module

    from sglang.srt.entrypoints.openai.protocol import Tool

    if case["parser"] not in SGLANG:
        return None
    module, _, name = SGLANG[case["parser"]].partition(".")
    detector = getattr(import_module(f"sglang.srt.function_call.{module}"), name)()
    found = detector.detect_and_parse(case["text"], [Tool(**tool) for tool in case["tools"]])
    return [[call.name, json.loads(call.parameters)] for call in found.calls]


def said(reads, case):
    try:
        return reads(case)
    except Exception as error:  # a parser's own fault is an answer too
        return repr(error)[:200]


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages of SGLang's server that its parsers import but never call."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


def prepare_sglang(folder):
    package = types.ModuleType("sglang")  # its own __init__ imports the whole server
    package.__path__ = [str(Path(folder) / "sglang")]
    sys.modules["sglang"] = package
    sys.meta_path.append(Absent())


def main():
    with contextlib.redirect_stdout(sys.stderr):
        cases = json.load(sys.stdin)
        by_vllm = [said(vllm_reads, case) for case in cases]
        prepare_sglang(sys.argv[1])
        by_sglang = [said(sglang_reads, case) for case in cases]
    json.dump([list(pair) for pair in zip(by_vllm, by_sglang, strict=True)], sys.stdout)


if __name__ == "__main__":
    main()
