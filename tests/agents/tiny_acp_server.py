"""An Agent Client Protocol server that no one listed: one model call a turn, which may end in a command.

It runs in the sandbox as `python3 -c`. Each line of the answer decides: `RUN <command>` runs the
command if the client permits it, `STOP <reason>` is the turn's stop reason, `WAIT` waits until the
client cancels, `FAIL <message>` is an error, and `EXIT` ends the server.
"""

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

MESSAGES: list[dict[str, str]] = []


def send(**message: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


def received() -> dict[str, Any]:
    message: dict[str, Any] = json.loads(sys.stdin.readline())
    return message


def ask_model(prompt: str) -> str:
    MESSAGES.append({"role": "user", "content": prompt})
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": MESSAGES}).encode()
    key = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    headers = {**key, "content-type": "application/json"}
    call = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers
    )
    with urllib.request.urlopen(call) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
    MESSAGES.append({"role": "assistant", "content": text})
    return text


def is_permitted() -> bool:
    kinds = ("allow_always", "allow_once", "reject_always", "reject_once")
    options = [{"optionId": f"my-{kind}", "name": kind, "kind": kind} for kind in kinds]
    asked = {"sessionId": "s", "toolCall": {"toolCallId": "run"}, "options": options}
    send(id="permission", method="session/request_permission", params=asked)
    return bool(received()["result"]["outcome"].get("optionId") == "my-allow_once")


def prompted(text: str) -> dict[str, Any]:
    """The result of a turn, or its error."""
    answer = ask_model(text)
    update = {"sessionUpdate": "agent_message_chunk", "content": {"type": "text", "text": answer}}
    send(method="session/update", params={"sessionId": "s", "update": update})
    word, _, rest = answer.partition(" ")
    if word == "EXIT":
        sys.exit(7)
    if word == "FAIL":
        return {"error": {"code": -32603, "message": rest}}
    if word == "WAIT":
        while received().get("method") != "session/cancel":
            pass
        return {"result": {"stopReason": "cancelled"}}
    if word == "RUN" and is_permitted():
        subprocess.run(["bash", "-c", rest], stdout=sys.stderr, check=True)
    return {"result": {"stopReason": rest if word == "STOP" else "end_turn"}}


def answered(method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "session/prompt":
        return prompted(params["prompt"][0]["text"])
    known = {
        "initialize": {"protocolVersion": 1, "agentCapabilities": {}},
        "session/new": {"sessionId": "s"},
    }
    return {"result": known[method]}


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request and "method" in request:
            send(id=request["id"], **answered(request["method"], request["params"]))
