"""Code that an agent runs in a real sandbox calls the model with the key that it inherits."""

import shlex
from pathlib import Path

import pytest

from perdure.episodes.trajectory_segments import cut
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.agent_stand import FILE, Stand, call, script
from perdure.types import AgentEnd, Outcome, Purpose
from tests.loop_agent import LoopAgent
from tests.stack.running_stack import TOOLS

HIDDEN = """
import json, os, urllib.request
def ask(*messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"authorization": f"Bearer {os.environ['KEY']}", "content-type": "application/json"}
    asked = urllib.request.Request("http://127.0.0.1:18001/v1/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(asked))["choices"][0]["message"]
question = {"role": "user", "content": "QUESTION of the tests"}
answer = ask(question)
print(answer["content"], ask(question, answer, {"role": "user", "content": "SECOND"})["content"])
"""


async def test_a_conversation_of_code_under_test_is_not_trained(tmp_path: Path) -> None:
    """A suite that asks twice gets its answers, and the agent's own turns are one segment, graded and
    trained as if the suite had not asked."""
    if missing := BubblewrapProvider(Settings(home=tmp_path / "boxes")).check():
        pytest.skip("; ".join(missing))
    run = await Stand(tmp_path, TOOLS).run(
        LoopAgent(),
        script(
            call("bash", command=f"python3 -c {shlex.quote(HIDDEN)}"),
            call("bash", command=f"sed -i 's/a - b/a + b/' {FILE}"),
            {"content": "Done."},
        ),
        asked={"QUESTION": {"content": "ANSWER"}, "SECOND": {"content": "AGAIN"}},
    )
    own = [turn for turn in run.turns if turn.purpose is Purpose.STEP]

    assert (run.end, run.grade.outcome) == (AgentEnd.FINISHED, Outcome.RESOLVED), run.said
    assert [turn.chain for turn in run.turns] == ["main", "stray", "stray", "main", "main"]
    assert "ANSWER AGAIN" in own[1].new_messages
    (segment,) = cut(run.turns)
    assert (segment.turns, run.trained()) == ((0, 3, 4), sum(t.sampled_tokens for t in own))
    run.assert_token_exact()
