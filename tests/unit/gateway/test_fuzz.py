"""Thousands of mutated requests through the real app always get an answer or an error in their dialect.

Mutations are seeded, so a failure repeats. `PERDURE_TEST_FUZZ_REQUESTS=50000` makes the long variant.
"""

import copy
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure.dialects import anthropic, gemini, openai_chat, openai_responses
from perdure.dialects.base import Dialect, Refused
from perdure.testing.local_gateway import LocalGateway
from perdure.testing.scripted_engine import ScriptedEngine
from tests.checkout_paths import ROOT

REQUESTS = int(os.environ.get("PERDURE_TEST_FUZZ_REQUESTS", "2000"))
THROUGH_THE_APP = max(REQUESTS // 20, 1)
RECORDINGS = ROOT.parent / "shared/data/trajectories/claude_code"
DIALECTS: dict[str, Dialect] = {
    "/v1/messages": anthropic,
    "/v1/chat/completions": openai_chat,
    "/v1/responses": openai_responses,
    "/v1beta/models/m:generateContent": gemini.Gemini("m", "generateContent"),
}
ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1 << 70,
    1e308,
    0.5,
    "",
    "x",
    "\ud800",
    "\x00",
    "<|im_end|>",
    "text",
    "assistant",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"type": "text"},
    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]},
    {"role": "system", "content": "now"},
    ["x"] * 2000,
]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CHAT_CALL = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
BUILT: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "model": "m",
        "max_tokens": 100,
        "stream": True,
        "system": [{"type": "text", "text": "You fix code."}],
        "thinking": {"type": "adaptive"},
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "tools": [{"name": "bash", "description": "Run.", "input_schema": SCHEMA}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "a", "name": "bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "a",
                        "is_error": False,
                        "content": [{"type": "text", "text": "a.py"}],
                    }
                ],
            },
        ],
    },
    "/v1/chat/completions": {
        "model": "m",
        "max_tokens": 100,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "stop": ["END"],
        "tools": [
            {"type": "function", "function": {"name": "bash", "parameters": SCHEMA}},
        ],
        "messages": [
            {"role": "system", "content": "You fix code."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "Hm.",
                "tool_calls": [CHAT_CALL],
            },
            {"role": "tool", "tool_call_id": "a", "content": "a.py"},
        ],
    },
    "/v1/responses": {
        "model": "m",
        "max_output_tokens": 100,
        "stream": True,
        "instructions": "You fix code.",
        "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "tools": [
            {"type": "function", "name": "bash", "parameters": SCHEMA},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
            {"type": "custom", "name": "patch"},
            {"type": "web_search"},
        ],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "perdure1:SG0u"},
            {"type": "message", "role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "a", "name": "bash", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "a.py"},
        ],
    },
    "/v1beta/models/m:generateContent": {
        "systemInstruction": {"parts": [{"text": "You fix code."}]},
        "generationConfig": {
            "maxOutputTokens": 100,
            "temperature": 0.5,
            "stopSequences": ["END"],
            "thinkingConfig": {"includeThoughts": True},
        },
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "tools": [
            {
                "functionDeclarations": [
                    {"name": "bash", "parametersJsonSchema": SCHEMA},
                    {"name": "f", "parameters": {"type": "OBJECT", "properties": {}}},
                ]
            }
        ],
        "contents": [
            {"role": "user", "parts": [{"text": "Hi"}, {"inlineData": {"mimeType": "image/png"}}]},
            {
                "role": "model",
                "parts": [
                    {"text": "Hm.", "thought": True},
                    {"text": "I look."},
                    {
                        "functionCall": {"id": "a", "name": "bash", "args": {"command": "ls"}},
                        "thoughtSignature": "cGVyZHVyZTE6SG0u",
                    },
                ],
            },
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"id": "a", "name": "bash", "response": {"output": "b"}}}
                ],
            },
        ],
    },
}


def _recorded() -> list[dict[str, Any]]:
    """Bodies that Claude Code sent, shortened to the parts that mutations change."""
    if not RECORDINGS.is_dir():
        return []
    requests = json.loads((RECORDINGS / "compact.json").read_text())["requests"]
    bodies = [request["body"] for request in requests]
    return [{**body, "tools": body["tools"][:2]} for body in bodies]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def _mutated(body: dict[str, Any], dice: random.Random) -> bytes:
    """Replaces, removes, repeats or moves one to three values; sometimes corrupts bytes."""
    body = copy.deepcopy(body)
    for _ in range(dice.randint(1, 3)):
        places = list(_places(body))
        if not places:
            break
        container, key = dice.choice(places)
        match dice.choice(["replace", "replace", "remove", "double", "move", "wrap"]):
            case "replace":
                container[key] = copy.deepcopy(dice.choice(ODD))
            case "remove":
                del container[key]
            case "double" if isinstance(container, list):
                container.insert(key, copy.deepcopy(container[key]))
            case "move":
                other, other_key = dice.choice(places)
                container[key] = copy.deepcopy(other[other_key])
            case _:
                container[key] = [container[key]]
    raw = json.dumps(body).encode()
    if dice.random() < 0.1:
        at = dice.randrange(len(raw))
        raw = raw[:at] + dice.randbytes(dice.randint(0, 3)) + raw[at + dice.randint(0, 3) :]
    return raw


def _requests(path: str, amount: int) -> Iterator[bytes]:
    dice = random.Random(f"{path} 1")
    bodies = [BUILT[path]] * 3 + (_recorded() if path == "/v1/messages" else [])
    for _ in range(amount):
        yield _mutated(dice.choice(bodies), dice)


@pytest.mark.parametrize("path", DIALECTS)
def test_every_mutated_request_is_parsed_or_refused(path: str) -> None:
    """A mutated request is parsed, or refused with 400; both cases occur."""
    seen: Counter[str] = Counter()
    for raw in _requests(path, REQUESTS):
        try:
            call = DIALECTS[path].parse(raw, {})
        except Refused as refused:
            seen[f"refused with {refused.status}"] += 1
        else:
            json.dumps(call.request.body).encode()
            seen["read"] += 1

    assert set(seen) == {"read", "refused with 400"}
    assert min(seen.values()) > REQUESTS // 10


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[LocalGateway]:
    script = {"content": "Hi.", "tool_calls": [{"name": "bash", "arguments": {"command": "ls"}}]}
    async with (
        ScriptedEngine({"default": {"turns": [script]}}) as engine,
        LocalGateway(tmp_path, engine={"url": engine.url, "kind": "vllm"}) as gateway,
    ):
        yield gateway


@pytest.mark.parametrize("path", DIALECTS)
async def test_every_mutated_request_is_answered(gateway: LocalGateway, path: str) -> None:
    """Through rendering, sampling and framing: a whole answer, or an error in the dialect."""
    key = await gateway.open("fuzz")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for raw in _requests(path, THROUGH_THE_APP):
            answer = await http.post(path, content=raw, headers={"x-api-key": key})

            assert answer.status_code in (200, 400), (raw, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["message"], raw
