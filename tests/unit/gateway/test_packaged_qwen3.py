"""The packaged tokenizer's format: ids of conversations and bridges, and parsed answers.

`qwen3_vectors.json` was recorded with another implementation of Qwen3's format (`renderers` 0.1.12).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.gateway.rendering.message_format import load_format

VECTORS = json.loads(Path(__file__).with_name("qwen3_vectors.json").read_text("utf-8"))
TOKENIZER, FORMAT = load_format("qwen3")
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.mark.parametrize("name", VECTORS["rendered"])
def test_a_conversation_has_the_recorded_ids(name: str) -> None:
    """The conversations have tools, calls, results, reasoning of this and earlier questions, and
    spelled-out tokens."""
    recorded = VECTORS["rendered"][name]
    ids = FORMAT.render_ids(
        recorded["messages"],
        tools=recorded["tools"],
        add_generation_prompt=recorded["generate"],
    )

    assert ids == recorded["ids"]


@pytest.mark.parametrize("name", VECTORS["bridged"])
def test_a_bridge_adds_the_recorded_ids(name: str) -> None:
    """The answer ended by itself, or was cut in its text or in its reasoning."""
    recorded = VECTORS["bridged"][name]
    prompt = VECTORS["rendered"]["system and tools"]["ids"]
    answer = TOKENIZER.encode(recorded["answer"])
    bridged = FORMAT.bridge_to_next_turn(prompt, answer, recorded["new"], tools=recorded["tools"])

    assert bridged == [*prompt, *recorded["added"]]


def test_an_answer_ends_with_qwen3s_tokens() -> None:
    assert FORMAT.get_stop_token_ids() == TOKENIZER.encode("<|im_end|><|endoftext|>")


@pytest.mark.parametrize(
    ("answer", "reasoning", "content", "calls"),
    [
        ("Done.", None, "Done.", 0),
        ("<think>\nHm.\n</think>\n\nDone.", "Hm.", "Done.", 0),
        (f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}", "Hm.", "I look.", 2),
        (f"<think>\nHm.\n{CALL}", "Hm.", "", 1),
        (f"<think>\n{CALL} or not?\n</think>\n\nDone.", f"{CALL} or not?", "Done.", 0),
    ],
    ids=["text", "thoughts", "calls", "a call ends its thoughts", "a call in its thoughts"],
)
def test_an_answer_is_read(answer: str, reasoning: Any, content: str, calls: int) -> None:
    """Calls inside closed reasoning are drafts. A call ends reasoning that is not closed."""
    read = FORMAT.parse_response(TOKENIZER.encode(f"{answer}<|im_end|>"))

    assert (read.reasoning_content, read.content) == (reasoning, content)
    assert [call.arguments for call in read.tool_calls] == [{"command": "ls"}] * calls


def test_arguments_are_rendered_as_the_model_writes_them() -> None:
    """Clients escape non-ASCII text; the model never samples such escapes."""
    function = {"name": "bash", "arguments": json.dumps({"command": "echo \u00e9 \u4e2d"})}
    said = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    ids = FORMAT.render_ids([{"role": "user", "content": "hi"}, said])

    assert '{"command": "echo \u00e9 \u4e2d"}' in TOKENIZER.decode(ids)
