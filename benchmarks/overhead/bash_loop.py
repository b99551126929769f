"""Runs in the sandbox: calls the model, runs its bash call and sends the output back, until the model
submits, calls nothing or has used its turns.

usage: python3 -I -S bash_loop.py PORT SUBMIT_LINE
(BENCH_KEY, BENCH_MODEL, BENCH_SYSTEM, BENCH_PROMPT; BENCH_TURNS, 0: no limit)

It uses one kept-alive connection and imports only what `json` needs, because its start is measured.
"""

import _socket
import json
import os
import sys
import time

TYPE_CHECKING = False  # importing `typing` takes a fifth of the start
if TYPE_CHECKING:
    from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}


TRIES = 60


def main(port: int, submit_line: str) -> int:
    given = (("system", os.environ["BENCH_SYSTEM"]), ("user", os.environ["BENCH_PROMPT"]))
    messages: list[dict[str, Any]] = [{"role": r, "content": text} for r, text in given if text]
    gateway, turns = Gateway(port), int(os.environ["BENCH_TURNS"])
    while True:
        message = gateway.ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return 0
        for call in message["tool_calls"]:
            code, output = _bash(json.loads(call["function"]["arguments"])["command"])
            if output.startswith(submit_line):
                return 0
            content = json.dumps({"returncode": code, "output": output})
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        turns -= 1
        if turns == 0:
            return 0


class Gateway:
    """One connection. It is reopened if it breaks, so that no agent is lost when the gateway restarts."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.connection: _socket.socket | None = None

    def ask(self, messages: "list[dict[str, Any]]") -> "dict[str, Any]":
        body = {"model": os.environ["BENCH_MODEL"], "messages": messages, "tools": [TOOL]}
        data = json.dumps(body).encode()
        for tries in range(TRIES):
            try:
                status, answer = self._post(data)
            except OSError:
                status, answer = 0, b"no connection"
                self.connection = None
            if status == 200:
                message: dict[str, Any] = json.loads(answer)["choices"][0]["message"]
                return message
            if 400 <= status < 500:
                break
            time.sleep(min(0.1 * 2**tries, 2.0))
        sys.exit(f"{status}: {answer.decode()}")

    def _post(self, data: bytes) -> tuple[int, bytes]:
        if self.connection is None:
            self.connection = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
            self.connection.connect(("127.0.0.1", self.port))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
            f"Authorization: Bearer {os.environ['BENCH_KEY']}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self.connection.sendall(head.encode() + data)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._more()
        headers, _, rest = answer.partition(b"\r\n\r\n")
        length = int(headers.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        while len(rest) < length:
            rest += self._more()
        return int(headers.split(b" ", 2)[1]), rest

    def _more(self) -> bytes:
        assert self.connection is not None
        data = self.connection.recv(1 << 16)
        if not data:
            raise OSError("closed")
        return data


def _bash(command: str) -> tuple[int, str]:
    reader, writer = os.pipe()
    pid = os.posix_spawn(
        "/bin/bash",
        ["bash", "-c", command],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, writer, 1),
            (os.POSIX_SPAWN_DUP2, writer, 2),
        ],
    )
    os.close(writer)
    output = b""
    while part := os.read(reader, 1 << 16):
        output += part
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), output.decode("utf-8", "replace")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
