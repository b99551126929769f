"""A tiny MCP server on streamable HTTP, an agent that calls its tool, and the Harbor task that has both.

The server sends JSON answers and uses only Python's standard library, because the images of these
tests have no package index. `tests/agents/test_mcp.py` has the published SDK and real agents.
"""

from typing import ClassVar

from perdure.agents import mcp_config
from perdure.agents.base import AgentTask, Launch
from tests.integration.command_agent import CommandAgent

SERVER = """\
import http.server, json, os

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/mcp" or "authorization" in self.headers:
            return self.send_error(400)  # a server in the sandbox gets no session key
        if asked["method"] == "notifications/initialized":
            self.send_response(202)
            self.send_header("content-length", "0")
            return self.end_headers()
        if asked.get("params", {}).get("name") == "die":
            os._exit(1)
        found = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                           "serverInfo": {"name": "vault", "version": "1"}},
            "tools/call": {"content": [{"type": "text", "text": "the word is plover"}]},
        }[asked["method"]]
        body = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": found}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""
CALLS = """
import json, sys, urllib.request

def post(method, params, number=None):
    body = {"jsonrpc": "2.0", "method": method, "params": params}
    body |= {} if number is None else {"id": number}
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    request = urllib.request.Request(sys.argv[1], json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=60).read()

client = {"name": "caller", "version": "1"}
post("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}, 1)
post("notifications/initialized", {})
answer = json.loads(post("tools/call", {"name": sys.argv[2], "arguments": {}}, 2))
open("/logs/artifacts/word", "w").write(answer["result"]["content"][0]["text"])
"""
CONFIG = """
[[environment.mcp_servers]]
name = "vault"
transport = "streamable-http"
url = "http://vault:8000/mcp"
"""
TEST = "grep -q plover /logs/artifacts/word && good=1 || good=0\n"


class ToolCaller(CommandAgent):
    """Asks the task's server for a word, and writes it down. It calls no model."""

    name: ClassVar[str] = "tool_caller"
    needs_model: ClassVar[bool] = True
    uses_mcp_servers: ClassVar[bool] = True
    tool: ClassVar[str] = "word"

    def launch(self, task: AgentTask) -> Launch:
        at = mcp_config.address(task, "vault", key=task.session_key)
        assert at is not None
        program = 'mkdir -p /logs/artifacts; exec python3 -c "$0" "$@"'
        return Launch(argv=("sh", "-c", program, CALLS, at.url, self.tool))


class ServerKiller(ToolCaller):
    """Calls a tool in which the server dies."""

    name: ClassVar[str] = "server_killer"
    tool: ClassVar[str] = "die"
