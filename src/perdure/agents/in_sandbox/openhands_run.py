"""Runs OpenHands' SDK headless, with the agent, tools and prompts of its default preset.

It runs in the agent's own Python in the sandbox, where Perdure is not installed. It reads a JSON
file of settings, and the prompt from standard input. It prints one event per line, `perdure_end`
last.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(settings: dict[str, Any], prompt: str) -> None:
    from openhands.sdk import LLM, Conversation  # type: ignore[import-not-found]
    from openhands.tools.preset.default import (  # type: ignore[import-not-found]
        get_default_agent,
    )

    key = os.environ.pop("PERDURE_SESSION_KEY")
    agent = get_default_agent(llm=LLM(api_key=key, **settings["llm"]), cli_mode=True)
    if servers := settings["mcp_servers"]:
        agent = agent.model_copy(update={"mcp_config": mcp_config(servers, key)})
    conversation = Conversation(
        agent=agent,
        workspace=os.getcwd(),
        callbacks=[lambda event: tell(json.loads(event.model_dump_json()))],
        persistence_dir=settings["persistence_dir"],
        visualizer=None,
        max_iteration_per_run=settings["max_steps"],
    )
    conversation.send_message(prompt)
    error = ""
    try:
        conversation.run()
    except Exception as raised:  # `perdure_end` reports it
        error = f"{type(raised).__name__}: {raised}"
    state = conversation.state
    codes = [event.code for event in state.events if event.kind == "ConversationErrorEvent"]
    status = codes[-1] if codes else state.execution_status
    tell({"kind": "perdure_end", "status": status, "error": error})
    conversation.close()


def mcp_config(servers: dict[str, Any], key: str) -> dict[str, Any]:
    """`key`: the session key, for servers behind the gateway. A server in the sandbox has its own headers
    instead."""
    from openhands.sdk.mcp.config import MCPServer  # type: ignore[import-not-found]

    headers = {"headers": {"Authorization": f"Bearer {key}"}}
    return {
        name: MCPServer.model_validate({**(headers if "url" in server else {}), **server})
        for name, server in servers.items()
    }


def tell(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), sys.stdin.read())
