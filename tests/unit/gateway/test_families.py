"""For every family of models, the tool-call parser is detected from the template, and turns round-trip."""

import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.errors import ConfigurationError
from perdure.gateway.rendering.chat_template import ChatTemplate
from perdure.gateway.rendering.control_token_text import MARK, marked
from perdure.gateway.rendering.message_format import Format, load_format
from perdure.gateway.rendering.parsed_response import ToolCallParseStatus
from perdure.gateway.rendering.tool_call_parsers.format_detection import TOOL_CALL_PARSERS
from perdure.gateway.turns.prompt_bridge import Miss, bridge
from tests.unit.gateway.families import FAMILIES, Family

Message = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "edit_file",
        "description": "Changes a file",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "line": {"type": "integer"},
                "all": {"type": "boolean"},
                "options": {"type": "object"},
            },
        },
    },
}
EDGES = st.sampled_from(
    ["a", "x = 1", '"', "'", "\\", "é", "中", "\U0001f600", "{", "}", "42", MARK]
)
"""Text with blanks at its ends, where templates may trim."""
TYPED = st.sampled_from(
    [
        *{token for one in FAMILIES.values() for token in one.control.split()},
        "<|im_end",
        " ",
        "\n",
        "b",
    ]
)
"""Text that users or tools may write, including control tokens of every family."""


@st.composite
def texts(draw: st.DrawFn) -> str:
    middle = draw(st.lists(st.one_of(EDGES, TYPED), max_size=4))
    return "".join([draw(EDGES), *middle, draw(EDGES)])


ARGUMENTS = st.fixed_dictionaries(
    {"path": texts()},
    optional={
        "line": st.integers(-3, 10**6),
        "all": st.booleans(),
        "options": st.dictionaries(
            st.sampled_from(["k", "l"]), texts() | st.booleans(), max_size=2
        ),
    },
)


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Format]:
    parent = tmp_path_factory.mktemp("families")
    return {
        name: load_format(str(family.folder(parent, f"model-{number}")))
        for number, (name, family) in enumerate(FAMILIES.items())
    }


def say(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def called(content: str, *arguments: Message) -> Message:
    """An answer as an agent sends it back, with the ids that the agent saw."""
    calls = [
        {
            "id": f"call_{at:09}",
            "type": "function",
            "function": {"name": "edit_file", "arguments": json.dumps(one, ensure_ascii=False)},
        }
        for at, one in enumerate(arguments)
    ]
    return {**say("assistant", content), "tool_calls": calls}


def sampled(family: Family, format_: Format, asked: list[Message], answer: Message) -> list[int]:
    """The ids of an answer as its template writes it, up to the token that stops the model."""
    tokenizer, renderer = format_
    prompt = renderer.render_ids(asked, tools=[TOOL], add_generation_prompt=True)
    whole = renderer.render_ids([*asked, answer], tools=[TOOL])
    assert whole[: len(prompt)] == prompt
    ids = whole[len(prompt) :]
    if family.stop:
        return [*ids, tokenizer.convert_tokens_to_ids(family.stop)]
    ends = {*renderer.get_stop_token_ids(), tokenizer.convert_tokens_to_ids("<|end|>")}
    return ids[: next(at for at, token in enumerate(ids) if token in ends) + 1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_renamed_checkpoint_is_detected_by_its_template(
    name: str, formats: dict[str, Format]
) -> None:
    """The template decides, not the folder's name."""
    renderer = formats[name].renderer

    assert isinstance(renderer, ChatTemplate)
    assert renderer.parser.name == FAMILIES[name].parser


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_turn_round_trips(name: str, formats: dict[str, Format], data: st.DataObject) -> None:
    """Render, sample, parse, echo, bridge: the calls are those that were written, the bridge begins
    with the recorded ids and ends as the template would, and text never becomes a control token."""
    family, format_ = FAMILIES[name], formats[name]
    renderer, asked = format_.renderer, [say("user", data.draw(texts()))]
    arguments = data.draw(st.lists(ARGUMENTS, min_size=1, max_size=1 if family.one_call else 3))
    content = data.draw(texts()) if family.text_beside_calls else ""
    answer = called(content, *arguments)
    completion = sampled(family, format_, asked, answer)
    prompt = renderer.render_ids(asked, tools=[TOOL], add_generation_prompt=True)

    read = renderer.parse_response(completion, tools=[TOOL], prompt_ids=prompt)

    assert [(call.name, call.arguments) for call in read.tool_calls] == [
        ("edit_file", one) for one in arguments
    ]
    assert read.content.strip() == content.strip()
    results = [
        {**say("tool", data.draw(texts())), "tool_call_id": call["id"], "name": "edit_file"}
        for call in answer["tool_calls"]
    ]
    given_ids = [
        {**result, "tool_call_id": call.id or result["tool_call_id"]}
        for result, call in zip(results, read.tool_calls, strict=True)
    ]
    bridged = renderer.bridge_to_next_turn(prompt, completion, given_ids, tools=[TOOL])
    whole = renderer.render_ids(
        [*asked, answer, *results], tools=[TOOL], add_generation_prompt=True
    )
    assert bridged is not None
    assert bridged == whole


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=texts(), more=texts())
def test_plain_text_round_trips(
    name: str, formats: dict[str, Format], text: str, more: str
) -> None:
    """An answer without calls is the sampled text, and the next user message is bridged."""
    format_ = formats[name]
    tokenizer, renderer = format_
    asked = [say("user", "hi")]
    prompt = renderer.render_ids(asked, add_generation_prompt=True)
    completion = sampled(FAMILIES[name], format_, asked, say("assistant", text))

    read = renderer.parse_response(completion, prompt_ids=prompt)
    bridged = renderer.bridge_to_next_turn(prompt, completion, [say("user", more)])

    assert (read.content, read.tool_calls) == (text, ())
    if FAMILIES[name].stop:  # it stopped for a result, so no user message may follow
        assert bridged is None
        return
    assert bridged is not None
    assert bridged[: len(prompt) + len(completion)] == prompt + completion
    added = tokenizer.decode_marked(bridged[len(prompt) + len(completion) :])
    assert marked(more, tokenizer.control) in added


@pytest.mark.parametrize("name", FAMILIES)
def test_a_truncated_answer_is_closed(name: str, formats: dict[str, Format]) -> None:
    """A cut by length leaves no end token, so the bridge writes it once."""
    tokenizer, renderer = formats[name]
    prompt = renderer.render_ids([say("user", "hi")], add_generation_prompt=True)
    completion = tokenizer.encode_plain("so I")

    bridged = renderer.bridge_to_next_turn(prompt, completion, [say("user", "go on")])

    assert bridged is not None
    closing = bridged[len(prompt) + len(completion)]
    ends = {*renderer.get_stop_token_ids(), tokenizer.convert_tokens_to_ids("<|end|>")}
    assert closing in ends


@pytest.mark.parametrize("name", [name for name in FAMILIES if "<think>" in FAMILIES[name].control])
def test_reasoning_is_read_and_closed(name: str, formats: dict[str, Format]) -> None:
    """Reasoning is separated from the text. Truncated reasoning is closed before the next
    message."""
    tokenizer, renderer = formats[name]
    think, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    hm, ok = tokenizer.encode_plain("hm"), tokenizer.encode_plain("ok")
    prompt = [*renderer.render_ids([say("user", "hi")], add_generation_prompt=True), think]

    whole = renderer.parse_response([think, *hm, end, *ok])
    opened = renderer.parse_response([*hm, end, *ok], prompt_ids=prompt)
    cut = renderer.parse_response(hm, prompt_ids=prompt)
    bridged = renderer.bridge_to_next_turn(prompt, hm, [say("user", "go on")])

    assert (whole.reasoning_content, whole.content) == ("hm", "ok")
    assert (opened.reasoning_content, opened.content) == ("hm", "ok")
    assert (cut.reasoning_content, cut.reasoning_complete, cut.content) == ("hm", False, "")
    assert bridged is not None
    assert bridged[len(prompt) + len(hm)] == end


def test_a_result_has_the_models_own_id(formats: dict[str, Format]) -> None:
    """Agents see ids that the gateway minted; the model sees the id and the name that it wrote."""
    tokenizer, renderer = formats["Kimi K2"]
    prompt = renderer.render_ids([say("user", "hi")], tools=[TOOL], add_generation_prompt=True)
    completion = tokenizer.encode(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit_file:4<|tool_call_argument_begin|>"
        '{"path": "a"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )
    answer = SimpleNamespace(message=called("", {"path": "a"}))
    record = SimpleNamespace(completion=array("i", completion), answer=answer, reasoning_open=False)
    node: Any = SimpleNamespace(ids=lambda: array("i", prompt + completion), record=record)
    result = {**say("tool", "done"), "tool_call_id": "call_000000000"}

    bridged = bridge(renderer, node, node.ids(), [result], [TOOL])

    assert not isinstance(bridged, Miss)
    shown = tokenizer.decode(bridged[len(prompt) + len(completion) :])
    assert shown.startswith(
        "<|im_system|>edit_file<|im_middle|>## Return of functions.edit_file:4\ndone"
    )


def test_gpt_oss_reasons_in_a_channel(formats: dict[str, Format]) -> None:
    """`analysis` is reasoning; `commentary` without a recipient is text next to the call."""
    tokenizer, renderer = formats["gpt-oss"]
    text = (
        "<|channel|>analysis<|message|>Let me look.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.edit_file <|constrain|>json"
        '<|message|>{"path": "a"}<|call|>'
    )

    read = renderer.parse_response(tokenizer.encode(text))

    assert (read.reasoning_content, read.content) == ("Let me look.", "I look.")
    assert [(call.name, call.arguments) for call in read.tool_calls] == [
        ("edit_file", {"path": "a"})
    ]


BROKEN = {
    "hermes": "<tool_call>{broken</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=edit_file>\n<parameter=path>\na",
    "glm45": "<tool_call>edit_file\n<arg_key>path</arg_key></tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.edit_file:0"
    "<|tool_call_argument_begin|>{<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>edit_file<｜tool▁call▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>edit_file<｜tool▁sep｜>{<｜tool▁call▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="edit_file">',
    "minimax_m2": '<minimax:tool_call><invoke name="edit_file">',
    "openai": " to=functions.edit_file<|channel|>commentary json<|message|>{",
    "mistral": '[TOOL_CALLS] [{"name": "edit_file"',
    "nemotron_json": "<TOOLCALL>[{]</TOOLCALL>",
}


@pytest.mark.parametrize("parser", BROKEN)
def test_a_broken_call_stays_in_the_text_with_its_reason(parser: str) -> None:
    """Text that does not parse is an attempted call, never a guess, and the agent sees it as
    sampled."""
    read = TOOL_CALL_PARSERS[parser].read(BROKEN[parser], [TOOL], opened=False)

    assert len(read.tool_calls) == 1
    assert read.tool_calls[0].status is not ToolCallParseStatus.OK
    assert read.tool_calls[0].raw.removeprefix("<|start|>assistant") in BROKEN[parser]


@pytest.mark.parametrize(
    "text",
    [
        "<function=edit_file>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=edit_file>\n<parameter=path>\na\n</parameter>\n</function>",
    ],
)
def test_qwen3_coder_may_omit_a_tag(text: str) -> None:
    """The model often omits the opening tag; the function block is enough."""
    read = TOOL_CALL_PARSERS["qwen3_coder"].read(text, [TOOL], opened=False)

    assert [(call.name, call.arguments) for call in read.tool_calls] == [
        ("edit_file", {"path": "a"})
    ]
    assert read.content == ""


@pytest.mark.parametrize(
    ("parser", "text"),
    [("llama3_json", '{"name": "other", "parameters": {}}'), ("llama4_pythonic", "[1, other()]")],
)
def test_text_that_only_looks_like_a_call_is_text(parser: str, text: str) -> None:
    """Without marks, text is a call only if its tool was offered."""
    read = TOOL_CALL_PARSERS[parser].read(text, [TOOL], opened=False)

    assert (read.content, read.tool_calls) == (text, ())


def test_a_template_with_unreadable_calls_is_refused(tmp_path: Path) -> None:
    """It is refused at the start, with the setting and its values."""
    odd = Family(
        "", "<end> <turn>", user="<turn>{{ m.content }}<end>", answer="<turn>", call="CALL {{ c.id }}",
        close="<end>", result="",
    )  # fmt: skip

    with pytest.raises(
        ConfigurationError, match=r"PERDURE_ENGINE__TOOL_CALL_PARSER.*kimi_k2.*'text'"
    ):
        load_format(str(odd.folder(tmp_path)))


def test_a_template_that_shows_no_tools_is_refused(tmp_path: Path) -> None:
    """Otherwise an agent's tools would be lost silently; the setting accepts such a model."""
    family = FAMILIES["DeepSeek V3, R1"]
    blind = Family(**{**vars(family), "tools": ""})
    folder = str(blind.folder(tmp_path))

    with pytest.raises(ConfigurationError, match="does not show tools"):
        load_format(folder)

    assert load_format(folder, "text").renderer.parser.name == "text"
    assert load_format(folder, "deepseek_v3").renderer.parser.name == "deepseek_v3"


def test_an_unknown_parser_is_refused_with_all_choices(tmp_path: Path) -> None:
    """The message has the setting, the value and all choices."""
    folder = FAMILIES["Qwen3"].folder(tmp_path)

    with pytest.raises(
        ConfigurationError, match=r"PERDURE_ENGINE__TOOL_CALL_PARSER is 'qwen'.*hermes"
    ):
        load_format(str(folder), "qwen")


def test_the_packaged_tokenizer_has_one_parser() -> None:
    """A setting that cannot apply is refused, not ignored."""
    with pytest.raises(
        ConfigurationError, match=r"PERDURE_ENGINE__TOOL_CALL_PARSER is 'glm45'.*TOKENIZER"
    ):
        load_format("qwen3", "glm45")
