"""A tiny agent for tests: does what the model says, and leaves a trace of every start and command.

Named in requests by its dotted path, `tests.loop_agent:LoopAgent`. It repeats an unanswered call
for as long as its budget lasts, as real agents do for a while.
"""

import json
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from perdure.agents import agent_options
from perdure.agents.base import EVIDENCE, HOME, AgentTask, Evidence, Launch
from perdure.sandboxes.base import ExecState, Mount
from perdure.settings.settings_tree import AgentSettings
from perdure.types import AgentEnd, Request

NAME = "tests.loop_agent:LoopAgent"
DONE = "DONE"
"""The answer, without a command, that ends it."""
STARTS = f"{EVIDENCE}/starts.log"
COMMANDS = f"{EVIDENCE}/commands.log"
PROGRAM_FILE = f"{HOME}/loop.py"
HEADERS_FILE = f"{HOME}/loop-headers.json"

PROGRAM = r"""
import json, os, subprocess, sys, time, urllib.error, urllib.request

url, starts, commands = sys.argv[1], sys.argv[2], sys.argv[3]
os.makedirs(os.path.dirname(starts), exist_ok=True)
with open(starts, "a") as file:
    file.write(f"{os.getpid()}\n")

def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    with open(os.path.join(os.path.dirname(sys.argv[0]), "loop-headers.json")) as file:
        headers.update(json.load(file))
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
                return json.load(answer)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                sys.exit(f"refused: {error.code} {error.read()[:200]}")
        except (OSError, ValueError, EOFError) as error:
            print("asked again:", repr(error), file=sys.stderr)
        time.sleep(0.05)

messages = [{"role": "user", "content": os.environ["TASK"]}]
while True:
    message = ask(messages)
    if not message.get("tool_calls"):
        break
    call = message["tool_calls"][0]
    command = json.loads(call["function"]["arguments"])["command"]
    with open(commands, "a") as file:
        file.write(command + "\n")
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    print(command, done.returncode, flush=True)
    answer = {"role": "tool", "tool_call_id": call["id"], "content": done.stdout[-1000:]}
    messages += [message, answer]
"""


class LoopAgentOptions(Request):
    mark: str = Field("", description="A mark in its command line, by which the host can find it.")


class LoopAgent:
    name: ClassVar[str] = NAME
    needs_model: ClassVar[bool] = True
    artifacts: ClassVar[tuple[str, ...]] = (STARTS, COMMANDS)

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[Mount, ...]:
        return ()

    def launch(self, task: AgentTask) -> Launch:
        chosen = agent_options.parse(self.name, LoopAgentOptions, task.options)
        url = f"{task.gateway_url}/v1/chat/completions"
        return Launch(
            argv=("python3", PROGRAM_FILE, url, STARTS, COMMANDS, chosen.mark),
            env={"KEY": task.session_key, "TASK": task.instance.problem_statement},
            files={
                PROGRAM_FILE: PROGRAM.encode(),
                HEADERS_FILE: json.dumps(task.headers).encode(),
            },
        )

    def classify(self, evidence: Evidence) -> AgentEnd:
        if evidence.turns == 0:
            return AgentEnd.NEVER_CALLED_MODEL
        if evidence.status.ok:
            return AgentEnd.FINISHED
        killed = evidence.status.state is ExecState.KILLED
        return AgentEnd.LIMIT if killed and evidence.status.cause == "timeout" else AgentEnd.CRASHED
