"""An agent for models that say noise: it notes three answers in a file, which is its patch.

A random model never calls a tool, so a loop over tools would end at its first turn.
"""

from typing import ClassVar

from perdure.agents.base import AgentTask, Launch
from tests import loop_agent
from tests.loop_agent import LoopAgent

NAME = "tests.real.note_agent:NoteAgent"
TURNS = 3
FILE = "answer.txt"

PROGRAM = r"""
import json, os, sys, urllib.request

messages = [{"role": "user", "content": os.environ["TASK"]}]
for _ in range(int(sys.argv[2])):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["KEY"], "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(sys.argv[1], body, headers)) as answer:
        message = json.load(answer)["choices"][0]["message"]
    with open(sys.argv[3], "a") as file:
        file.write(repr(message["content"]) + "\n")
    messages += [message, {"role": "user", "content": "Go on."}]
"""


class NoteAgent(LoopAgent):
    name: ClassVar[str] = NAME
    artifacts: ClassVar[tuple[str, ...]] = ()

    def launch(self, task: AgentTask) -> Launch:
        url = f"{task.gateway_url}/v1/chat/completions"
        return Launch(
            argv=("python3", loop_agent.PROGRAM_FILE, url, str(TURNS), f"{task.workdir}/{FILE}"),
            env={"KEY": task.session_key, "TASK": task.instance.problem_statement},
            files={loop_agent.PROGRAM_FILE: PROGRAM.encode()},
        )
