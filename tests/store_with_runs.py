"""A store with rollouts as a reader meets them, written as the stages write them, for the viewer's tests."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.episodes import turns_parquet
from perdure.episodes.episode import AttemptSummary, EpisodeParts
from perdure.episodes.trajectory_segments import cut
from perdure.errors import Boundary
from perdure.gateway.rendering.tokenizers import load_tokenizer
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import (
    Failure,
    Grade,
    Outcome,
    PatchRef,
    Purpose,
    Rewards,
    RolloutRequest,
    RolloutStatus,
    TestStatus,
    Turn,
)
from tests.stored_episodes import store_episode

PATCH = """\
diff --git a/h11/_headers.py b/h11/_headers.py
index 1111111..2222222 100644
--- a/h11/_headers.py
+++ b/h11/_headers.py
@@ -12,4 +12,4 @@ def normalize(headers):
     for name, value in headers:
-        lengths = value
+        lengths = {length.strip() for length in value.split(b",")}
         found.append((name, value))
     return found
"""
TEST = "tests/test_headers.py::test_content_length"
LOG = "\n".join(
    [f"{n:04} collected" for n in range(400)]
    + ["=" * 20 + " FAILURES " + "=" * 20, "_" * 10 + " test_content_length " + "_" * 10]
    + ["    assert lengths == {b'12'}", "E   AssertionError: b'12, 12'", f"FAILED {TEST}"]
    + [f"{n:04} after" for n in range(300)]
)
DIFF_SHOWN = "$ git diff\n" + PATCH


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call-{name}", "type": "function", "function": function}


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def turns(texts: Sequence[str] = (), *, ids: bool = True) -> list[Turn]:
    """A main chain, a sub-agent, a title, an unused answer. `texts`: what a tool printed, in order."""
    first, second = (*texts, "12 passed", "the file")[:2]
    made: list[Turn] = []

    def turn(new: list[dict[str, Any]], answer: dict[str, Any], **fields: Any) -> None:
        parent = next((t for t in made if t.index == fields.get("parent")), None)
        held = (*parent.prompt_ids, *parent.completion_ids) if parent else ()
        tokenizer = load_tokenizer("qwen3")
        said = "".join(str(m["content"]) for m in new)
        prompt = (*held, *tokenizer.encode_plain(said or " "))
        spoken = answer.get("reasoning_content", "") + answer["content"] + "<|im_end|>"
        completion = tuple(tokenizer.encode(spoken))
        logprobs = tuple(-0.003 * (5 ** (n % 5)) for n in range(len(completion)))
        span = {"version": 6 + len(made) // 3, "start": 0, "end": len(completion)}
        taken = {"prompt_ids": prompt, "completion_ids": completion, "logprobs": logprobs}
        made.append(
            Turn.model_validate(
                {
                    "index": len(made),
                    "new_messages": json.dumps(new),
                    "answer": json.dumps(answer),
                    "engine": "vllm-0",
                    "seconds": 1.5,
                    "bridged": parent is not None,
                    "bridge_miss": None if parent else "first",
                    **(taken | {"versions": (span,)} if ids else {"trainable": False}),
                    **fields,
                }
            )
        )

    turn(
        [message("system", "You fix bugs."), message("user", "Fix the content-length header.")],
        message("assistant", "", reasoning_content="Look at the headers first.",
                tool_calls=[call("Bash", command="pytest -x tests/test_headers.py")]),
    )  # fmt: skip
    turn(
        [message("user", "Name this conversation.")],
        message("assistant", "Content-length bug"),
        purpose=Purpose.SIDE,
    )
    turn(
        [message("user", "Find where headers are normalized.")],
        message("assistant", "In h11/_headers.py, line 12."),
        chain="agent-7", parent_chain="main",
    )  # fmt: skip
    turn(
        [message("tool", first)],
        message("assistant", "I change the parsing.", tool_calls=[
            call("Edit", file_path="h11/_headers.py", old_string="lengths = value",
                 new_string='lengths = {length.strip() for length in value.split(b",")}')]),
        parent=0,
    )  # fmt: skip
    turn([message("tool", second)], message("assistant", "An answer that was lost."), parent=3,
         unused=True)  # fmt: skip
    turn([message("tool", second), message("tool", DIFF_SHOWN)],
         message("assistant", "The header is fixed ✓."), parent=3)  # fmt: skip
    return made


async def write_rollout(
    store: Store,
    run_id: str = "made",
    instance: str = "h11-0.14.0",
    sample: int = 0,
    *,
    resolved: bool = False,
    failure: str = "",
    said: Sequence[Turn] | None = None,
    patch: bytes = PATCH.encode(),
    log: bytes = LOG.encode(),
    reason: str = "",
    failing: str = TEST,
    ended: bool = True,
    graded: Mapping[str, Any] | None = None,
) -> RolloutRequest:
    """One rollout with all its files. `ended`: with its episode. `graded`: fields of its grade."""
    request = RolloutRequest(
        run_id=run_id, instance=f"first-steps/{instance}", sample_index=sample, model="tiny"
    )
    taken = list(turns() if said is None else said)
    folder = store_keys.attempt(request, 1)
    captured = PatchRef(
        key=f"{folder}/patch.diff",
        sha256=hashlib.sha256(patch).hexdigest(),
        size=len(patch),
        empty=not patch,
        files=1,
    )
    status = TestStatus.PASSED if resolved else TestStatus.FAILED
    grade = Grade(
        outcome=Outcome.RESOLVED if resolved else Outcome.UNRESOLVED,
        reason=reason,
        rewards=Rewards(binary=float(resolved)),
        fail_to_pass={failing: status},
        pass_to_pass={"tests/test_other.py::test_kept": TestStatus.PASSED},
        log_key=f"{folder}/tests-1.log",
        seconds=3.5,
    ).model_copy(update=graded)
    sandbox = {"provider": "bubblewrap", "host": "here", "seconds": 1.0}
    agent = {"end": "finished", "seconds": 40.0, "turns": len(taken), "tokens": 100}
    files = {
        "sandbox.json": json.dumps(sandbox).encode(),
        "agent.json": json.dumps(agent).encode(),
        "agent/stdout": b"the agent's own output\n",
        "patch.diff": patch,
        "patch.json": captured.model_dump_json().encode(),
        "turns.parquet": turns_parquet.encode(taken),
        "tests-1.log": log,
        "grade-1.json": grade.model_dump_json().encode(),
    }
    if failure or not ended:
        files = {name: data for name, data in files.items() if name[:5] not in ("patch", "grade")}
    for name, data in files.items():
        await store.put(f"{folder}/{name}", data)
    if not ended:
        return request
    wrong = Failure(boundary=Boundary.SANDBOX, type="SandboxLost", message=failure)
    parts = EpisodeParts(
        request=request,
        status=RolloutStatus.FAILED if failure else RolloutStatus.GRADED,
        started_at=1_790_000_000.0,
        finished_at=1_790_000_060.0 + sample,
        attempts=[
            AttemptSummary(
                attempt=1,
                provider="bubblewrap",
                evidence=tuple(f"{folder}/{name}" for name in files),
            )
        ],
        turns=taken,
        turns_key=f"{folder}/turns.parquet",
        patch=None if failure else captured,
        grade=None if failure else grade,
        failure=wrong if failure else None,
    )
    segments = cut(taken)
    await store_episode(store, parts, segments)
    return request
