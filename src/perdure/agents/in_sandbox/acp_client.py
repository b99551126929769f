"""Runs an Agent Client Protocol server: one session, the user's messages one after another.

It runs in the sandbox in a Python of its own, where Perdure is not installed. It reads a JSON file
of settings, the first message from standard input, and further ones from files, which the host writes
as `perdure.agents.user_messages` describes. It prints one JSON object per line: the session's
updates as the server sent them, and `turn_end` after each turn.
"""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

FINISHED, CRASHED, LIMIT, GAVE_UP = 0, 1, 3, 4
"""Exit codes, which `perdure.agents.acp` reads."""
EXIT_CODES = {
    "end_turn": FINISHED,
    "max_tokens": LIMIT,
    "max_turn_requests": LIMIT,
    "cancelled": LIMIT,
    "refusal": GAVE_UP,
}
LIMIT_WORDS = (
    "context_length_exceeded",
    "context length",
    "context window",
    "contextoverflow",
    "prompt is too long",
    "maximum number of tokens",
    "output token maximum",
)
"""An error that contains one of these (in lower case) means that a token limit was reached."""
NO_SUMMARY = "not allowed while generating summary"
"""OpenCode's error contains this if the model called a tool instead of summarizing the history."""
LINE_BYTES = 1 << 16
"""A longer update is printed without its content."""
MESSAGE_BYTES = 1 << 26
"""Limit on one message of the server."""
POLL_S = 0.2
"""Seconds between two looks for the user's next message. The host's time limit ends the wait."""
CANCEL_S = 30.0
"""Seconds that a server has to end a cancelled turn."""


def tell(event: dict[str, Any]) -> None:
    line = json.dumps(event)
    if len(line) > LINE_BYTES:
        kept = {name: value for name, value in event.items() if isinstance(value, str)}
        small = {name: value for name, value in kept.items() if len(value) <= 1024}
        line = json.dumps({**small, "bytes_left_out": len(line)})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Client:
    """Answers the server's requests. It declares no files and no terminals: a server uses its own."""

    def __init__(self, answer: str, failure: str, said_characters: int) -> None:
        self.answer, self.failure, self.said_characters = answer, failure, said_characters
        self.begin_turn()

    def begin_turn(self) -> None:
        self.is_cancelled = self.has_failed = False
        self.last_text = self.said = ""

    async def session_update(self, session_id: str, update: Any, **kwargs: Any) -> None:
        event = update.model_dump(mode="json", by_alias=True, exclude_none=True)
        self.has_failed |= bool(self.failure) and self.failure in json.dumps(event)
        if event["sessionUpdate"] == "agent_message_chunk":
            self.last_text = str(event["content"].get("text"))
            self.said = (self.said + self.last_text)[-self.said_characters :]
        elif self.said and not self.said.endswith("\n"):
            self.said += "\n\n"
        tell({"type": "update", **event})

    async def request_permission(
        self, session_id: str, tool_call: Any, options: list[Any], **kwargs: Any
    ) -> Any:
        kinds = {option.kind: option.option_id for option in reversed(options)}
        once = kinds.get(f"{self.answer}_once")
        chosen = None if self.is_cancelled else once or kinds.get(f"{self.answer}_always")
        tell({"type": "permission", "toolCallId": tool_call.tool_call_id, "option": chosen})
        if chosen is None:
            return {"outcome": {"outcome": "cancelled"}}
        return {"outcome": {"outcome": "selected", "optionId": chosen}}


class TurnFailed(Exception):
    """The server ended a turn like a successful one, but an update says that it failed."""


class Session:
    """An open session. A turn that takes longer than `turn_s` seconds is cancelled."""

    def __init__(self, connection: Any, client: Client, session_id: str, turn_s: float | None):
        self.connection, self.client = connection, client
        self.session_id, self.turn_s = session_id, turn_s

    async def turn(self, text: str) -> str:
        """Send a user's turn and return the stop reason.

        Raises: acp.RequestError, TurnFailed, TimeoutError.
        """
        from acp import text_block  # type: ignore[import-not-found]

        self.client.begin_turn()
        asked = asyncio.ensure_future(
            self.connection.prompt(session_id=self.session_id, prompt=[text_block(text)])
        )
        await asyncio.wait({asked}, timeout=self.turn_s)
        reason = str(asked.result().stop_reason) if asked.done() else await self._cancel(asked)
        if self.client.has_failed and reason == "end_turn":
            raise TurnFailed(self.client.last_text)
        return reason

    async def _cancel(self, asked: "asyncio.Future[Any]") -> str:
        from acp import RequestError

        self.client.is_cancelled = True
        await self.connection.cancel(session_id=self.session_id)
        try:
            async with asyncio.timeout(CANCEL_S):
                return str((await asked).stop_reason)
        except RequestError:  # some servers answer a cancelled turn with an error
            return "cancelled"


def argv_of(command: list[str], packages: str, node: str) -> list[str]:
    """The command. A program of the npm package that needs Node gets Perdure's, not the image's."""
    program = shutil.which(command[0], path=f"{packages}/node_modules/.bin")
    if program is None:
        return command
    with open(program, "rb") as file:
        on_node = b"node" in file.readline(256)
    return [*([node] if on_node else []), os.path.realpath(program), *command[1:]]


def mcp_server(settings: dict[str, Any]) -> Any:
    from acp.schema import (  # type: ignore[import-not-found]
        HttpMcpServer,
        McpServerStdio,
        SseMcpServer,
    )

    if "url" in settings:
        kind = SseMcpServer if settings["type"] == "sse" else HttpMcpServer
        return kind.model_validate(settings)
    path = shutil.which(settings["command"]) or settings["command"]
    return McpServerStdio.model_validate({**settings, "command": path})


async def next_message(folder: Path, turn: int, said: str) -> str | None:
    """What the user answers to a turn; None if the conversation is over."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".turn-{turn}"
    unfinished.write_text(said, "utf-8", "replace")
    unfinished.rename(folder / f"turn-{turn}.txt")
    answer = folder / f"user-{turn}.json"
    while not answer.exists():
        await asyncio.sleep(POLL_S)
    message: str | None = json.loads(answer.read_bytes())["message"]
    return message


async def converse(settings: dict[str, Any], prompt: str) -> int:
    """Run all turns and return the exit code. Raises: as `Session.turn`, and OSError."""
    import acp
    from acp.schema import (
        ClientCapabilities,
        Implementation,
    )

    client = Client(settings["permissions"], settings["failure"], settings["said_characters"])
    argv = argv_of(settings["command"], settings["packages"], settings["node"])
    pipes = {"limit": MESSAGE_BYTES, "stderr": None}
    async with acp.spawn_agent_process(client, *argv, env=os.environ, transport_kwargs=pipes) as (
        connection,
        _,
    ):
        await connection.initialize(
            protocol_version=acp.PROTOCOL_VERSION,
            client_capabilities=ClientCapabilities(),
            client_info=Implementation(name="perdure", version="1"),
        )
        opened = await connection.new_session(
            cwd=os.getcwd(),
            mcp_servers=[mcp_server(one) for one in settings["mcp_servers"]],
            **settings["session_meta"],
        )
        session = Session(connection, client, opened.session_id, settings["turn_s"])
        message: str | None = prompt
        turn = 0
        while message is not None:
            turn += 1
            reason = await session.turn(message)
            tell({"type": "turn_end", "turn": turn, "stop_reason": reason})
            if not settings["conversation"] or reason not in ("end_turn", "cancelled"):
                break
            message = await next_message(Path(settings["conversation"]), turn, client.said)
    return EXIT_CODES[reason]


def main(settings: dict[str, Any], prompt: str) -> int:
    try:
        return asyncio.run(converse(settings, prompt))
    except Exception as raised:  # the exit code says that it failed, and this line why
        error = f"{type(raised).__name__}: {raised} {getattr(raised, 'data', None) or ''}"
        tell({"type": "error", "error": error[-LINE_BYTES // 8 :]})
        return exit_code_of(error)


def exit_code_of(error: str) -> int:
    if NO_SUMMARY in error:
        return GAVE_UP
    return LIMIT if any(words in error.lower() for words in LIMIT_WORDS) else CRASHED


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text()), sys.stdin.read()))
