"""Model families as published: templates of TRL, tokenizers of npm, parsers of vLLM and SGLang.

Slow: run by `make test-families`, which installs them below .perdure, once. The parsers run in vLLM's own
environment; Perdure imports none of them.
"""

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import ConfigurationError
from perdure.gateway.rendering.jinja_template import JinjaTemplate
from perdure.gateway.rendering.message_format import Format, load_format
from perdure.gateway.rendering.tool_call_parsers.format_detection import TOOL_CALL_PARSERS, detect
from tests.unit.gateway.families import FAMILIES, Family
from tests.unit.gateway.test_families import TOOL, called, say

ROOT = Path(__file__).resolve().parents[2]
VLLM, PUBLISHED = ROOT / ".perdure/vllm", ROOT / ".perdure/families"
DRAWS = 12
TEMPLATES = {
    "hermes": ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"],
    "qwen3_coder": [
        *("qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8"),
        *("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning"),
    ],
    "glm45": ["glm4moe"],
    "openai": ["gptoss"],
    "llama3_json": ["llama3_1", "llama3_2"],
}
"""TRL's copies of published templates, by the parser that reads them."""
BLIND = ["deepseekv3", "deepseek_r1_distill", "llama3", "phi3"]
"""Published templates that do not show tools to the model."""
TOKENIZERS = {"qwen3": "hermes", "gptoss": "openai", "llama3_1": "llama3_json"}
"""Those of npm, which lack a template or have an older one: TRL's is put beside them."""
WORDS = ["a b", 'x = "1"', "\n", "é中", "\\n", "{}", "<b>", "if a < b:", "true", "007"]


def installed(script: str, folder: Path) -> Path:
    done = subprocess.run(
        [ROOT / f"infra/setup/{script}", folder], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"infra/setup/{script} fails here: {' '.join(done.stderr.split())[-300:]}")
    return folder


@pytest.fixture(scope="session")
def published() -> Path:
    return installed("families", PUBLISHED)


def template(published: Path, name: str) -> JinjaTemplate:
    file = published / f"packages/trl/chat_templates/{name}.jinja"
    return JinjaTemplate(file.read_text("utf-8"), {"bos_token": "", "eos_token": ""})


@pytest.mark.parametrize(
    ("parser", "name"), [(n, one) for n, names in TEMPLATES.items() for one in names]
)
def test_a_published_template_says_its_parser(published: Path, parser: str, name: str) -> None:
    """No name of a model is looked at."""
    assert detect(template(published, name), "auto", []).parser.name == parser


@pytest.mark.parametrize("name", BLIND)
def test_a_template_without_tools_is_refused(published: Path, name: str) -> None:
    """Its agents would call nothing, in every one of thousands of rollouts."""
    with pytest.raises(ConfigurationError, match="does not show tools"):
        detect(template(published, name), "auto", [])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_published_tokenizer_round_trips(published: Path, tmp_path: Path, name: str) -> None:
    """Render, sample, read, bridge with the real vocabulary and template, offline."""
    shutil.copytree(published / "tokenizers" / name, tmp_path, dirs_exist_ok=True)
    shutil.copy(
        published / f"packages/trl/chat_templates/{name}.jinja", tmp_path / "chat_template.jinja"
    )
    format_ = load_format(str(tmp_path))
    renderer = format_.renderer
    asked = [say("system", "Be brief."), say("user", "Look at <|im_end|> and <|eot_id|>.")]
    answer = called("", {"path": 'a "b"\n', "line": 3})
    prompt = renderer.render_ids(asked, tools=[TOOL], add_generation_prompt=True)
    completion = _sampled(format_, asked, answer, prompt)

    read = renderer.parse_response(completion, tools=[TOOL], prompt_ids=prompt)
    result = {
        **say("tool", 'two\n"lines" <|end|>'),
        "tool_call_id": "call_000000000",
        "name": "edit_file",
    }
    bridged = renderer.bridge_to_next_turn(prompt, completion, [result], tools=[TOOL])

    assert renderer.parser.name == TOKENIZERS[name]
    assert [(c.name, c.arguments) for c in read.tool_calls] == [
        ("edit_file", {"path": 'a "b"\n', "line": 3})
    ]
    assert bridged is not None
    assert bridged[: len(prompt) + len(completion)] == prompt + completion
    whole = renderer.render_ids([*asked, answer, result], tools=[TOOL], add_generation_prompt=True)
    added = bridged[len(prompt) + len(completion) :]
    assert whole[-len(added) :] == added


def _sampled(format_: Format, asked: list[Any], answer: Any, prompt: list[int]) -> list[int]:
    whole = format_.renderer.render_ids([*asked, answer], tools=[TOOL])
    ids, stops = whole[len(prompt) :], format_.renderer.get_stop_token_ids()
    assert whole[: len(prompt)] == prompt
    return ids[: next(at for at, token in enumerate(ids) if token in stops) + 1]


def test_deepseek_v3_is_read_by_setting(published: Path) -> None:
    """Its template shows no tools, so only a person can say that the model calls them all the same."""
    folder = str(published / "tokenizers/deepseek_v3")

    with pytest.raises(ConfigurationError, match="does not show tools"):
        load_format(folder)

    renderer = load_format(folder, "deepseek_v3").renderer
    assert renderer.render_ids([say("user", "hi")], add_generation_prompt=True)


def test_calls_are_those_that_vllm_and_sglang_read(published: Path) -> None:
    """For every family, on answers as its template writes them."""
    vllm = installed("vllm", VLLM)
    dice = random.Random(7)
    cases = [_case(family, dice) for family in FAMILIES.values() for _ in range(DRAWS)]
    done = subprocess.run(
        [vllm / "venv/bin/python", ROOT / "tests/real/families/oracles.py", published / "packages"],
        input=json.dumps(cases), capture_output=True, text=True, check=True,
    )  # fmt: skip

    differ = []
    for case, read in zip(cases, json.loads(done.stdout), strict=True):
        ours = TOOL_CALL_PARSERS[case["parser"]].read(case["text"], [TOOL], opened=False)
        found = [[call.name, call.arguments] for call in ours.tool_calls]
        differ += [
            (case["parser"], case["text"], found, one) for one in read if one not in (None, found)
        ]
    assert differ == []


def _case(family: Family, dice: random.Random) -> dict[str, Any]:
    parser, written = TOOL_CALL_PARSERS[family.parser], JinjaTemplate(family.template)
    calls = 1 if family.one_call else dice.randint(1, 3)
    answer = called(
        "ok" if family.text_beside_calls else "", *(_arguments(dice) for _ in range(calls))
    )
    for at, call in enumerate(answer["tool_calls"]):
        call["id"] = parser.call_id(call["id"], "edit_file", at)
        if not family.arguments_as_text:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    asked = [say("user", "hi")]
    before = written.render(messages=asked, tools=[TOOL], add_generation_prompt=True)
    whole = written.render(messages=[*asked, answer], tools=[TOOL], add_generation_prompt=False)
    text = whole.removeprefix(before).rstrip()
    for end in family.control.split()[:2]:
        text = text.removesuffix(end)
    if family.parser == "llama4_pythonic":  # SGLang reads Python's spelling only
        text = text.replace("=true", "=True").replace("=false", "=False")
    return {
        "parser": family.parser,
        "text": text,
        "tools": [TOOL],
        "control": family.control.split(),
    }


def _arguments(dice: random.Random) -> dict[str, Any]:
    path = "".join(["p", *dice.choices(WORDS, k=3), "q"])
    more = {
        "line": dice.randint(0, 99),
        "all": dice.random() < 0.5,
        "options": {"k": dice.choice(WORDS)},
    }
    return {
        "path": path,
        **{key: more[key] for key in dice.sample(sorted(more), dice.randint(0, 3))},
    }
