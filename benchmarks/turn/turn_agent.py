"""The requests of a coding agent in Claude Code's format. It reads files one after another."""

import json
import random
from pathlib import Path
from typing import Any

import httpx

TOOL_COUNT = 6
TURN_TOKENS = 1500
"""Approximate tokens of one tool result while the history grows."""
SHORT_TOKENS = 300
"""Approximate tokens of one tool result while a size is measured."""


class Agent:
    """Sends Anthropic Messages, each with the whole history, as agents do."""

    def __init__(self, client: httpx.AsyncClient, key: str) -> None:
        self._client = client
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._dice = random.Random(0)
        self._lines = [
            line
            for path in sorted(Path(__file__).parents[2].glob("src/perdure/*.py"))
            for line in path.read_text().splitlines()
            if line.strip()
        ]
        self.messages: list[dict[str, Any]] = [
            {"role": "user", "content": [{"type": "text", "text": "Fix the bug."}]}
        ]

    def body(self) -> bytes:
        request = {
            "model": "policy",
            "system": [{"type": "text", "text": "You fix code in a repository. " * 40}],
            "messages": self.messages,
            "tools": [_tool(number) for number in range(TOOL_COUNT)],
            "max_tokens": 32_000,
        }
        return json.dumps(request).encode()

    async def turn(self, *, short: bool = False) -> None:
        """Make one call; add its answer and a tool result to the history."""
        answer = await self._client.post("/v1/messages", content=self.body(), headers=self._headers)
        answer.raise_for_status()
        self.heard(answer.json()["content"], short=short)

    def heard(self, content: list[dict[str, Any]], *, short: bool = False) -> None:
        """Add an answer and its tool results to the history."""
        said = self._file(SHORT_TOKENS if short else TURN_TOKENS)
        calls = [block["id"] for block in content if block["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call, "content": said} for call in calls
        ] or [{"type": "text", "text": said}]
        self.messages += [
            {"role": "assistant", "content": content},
            {"role": "user", "content": results},
        ]

    def _file(self, tokens: int) -> str:
        return "\n".join(self._dice.choices(self._lines, k=tokens // 12))


def _tool(number: int) -> dict[str, Any]:
    properties = {
        name: {"type": "string", "description": f"The {name} that the tool works on."}
        for name in ("file_path", "pattern", "command")
    }
    return {
        "name": "Read" if number == 0 else f"Tool{number}",
        "description": "Does one thing to the files of the repository. " * 8,
        "input_schema": {"type": "object", "properties": properties},
    }
