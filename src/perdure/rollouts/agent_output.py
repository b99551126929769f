"""Collects the agent's output and files from its sandbox and keeps them in the store."""

from perdure.agents.base import EXEC_ID, Agent, Evidence
from perdure.errors import NotFound
from perdure.limited_process import Unparsable, read
from perdure.rollouts.attempt_job import Job
from perdure.sandboxes.base import ExecStatus, Sandbox
from perdure.types import AgentEnd

TAIL = 4 << 20
"""Bytes kept from the end of each output stream."""
ARTIFACT_LIMIT = 64 << 20
"""Bytes read of one file of the agent."""
LINE = 200
"""Characters shown of the last line of output."""
LAST_LINE = 8 << 10
"""Bytes at the end of the output that are searched for its last line."""


async def collect(
    sandbox: Sandbox, status: ExecStatus, artifacts: tuple[str, ...], turns: int = 0
) -> Evidence:
    """Raises: SandboxLost."""
    return Evidence(
        status=status,
        stdout_tail=(await sandbox.output(EXEC_ID, "stdout"))[-TAIL:],
        stderr_tail=(await sandbox.output(EXEC_ID, "stderr"))[-TAIL:],
        files=await _files(sandbox, artifacts),
        turns=turns,
    )


async def _files(sandbox: Sandbox, paths: tuple[str, ...]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in paths:
        try:
            found[path] = await sandbox.get(path, limit=ARTIFACT_LIMIT)
        except NotFound:
            continue
    return found


async def keep(job: Job, evidence: Evidence) -> None:
    """Write to the attempt's `agent/` folder. Files that an earlier try wrote there stay."""
    kept = {"stdout.log": evidence.stdout_tail, "stderr.log": evidence.stderr_tail}
    kept |= {path.rsplit("/", 1)[-1]: data for path, data in evidence.files.items()}
    for name, data in kept.items():
        if data:
            await job.services.store.put_if_absent(job.key(f"agent/{name}"), data)


async def end_of(agent: Agent, evidence: Evidence, *, called: bool) -> AgentEnd:
    """How the agent ended, as its own class decides. If its files cannot be parsed, the end is
    LIMIT and the diff is graded, so that no agent can discard an episode. `called`: the agent made
    a model call, perhaps without an answer.

    Raises: RetryHere.
    """
    try:
        end = await read(agent.classify, evidence)
    except Unparsable:
        return AgentEnd.LIMIT
    return AgentEnd.CRASHED if called and end is AgentEnd.NEVER_CALLED_MODEL else end


def detail(end: AgentEnd, evidence: Evidence) -> str:
    """How the agent ended and its last line of output; empty if it finished or gave up."""
    if end in (AgentEnd.FINISHED, AgentEnd.GAVE_UP):
        return ""
    status = evidence.status
    how = f"{status.state.value}" + (
        f" by {status.cause}" if status.cause else f" {status.code}" if status.code else ""
    )
    tail = (evidence.stderr_tail or evidence.stdout_tail).rstrip()[-LAST_LINE:]
    last = tail.splitlines()[-1:]
    line = last[0].decode("utf-8", "replace") if last else ""
    if len(tail) == LAST_LINE and len(last[0]) == LAST_LINE:
        line = f"… {line.partition(' ')[2] or line}"  # the line begins before the bytes searched
    return f"{how}; {_shortened(line)}" if line else how


def _shortened(line: str) -> str:
    """The beginning of the line, which says what failed, cut between two words if possible."""
    if len(line) <= LINE:
        return line
    whole = line[:LINE].rpartition(" ")[0]
    return f"{whole or line[:LINE]} …"
