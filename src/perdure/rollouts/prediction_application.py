"""Applies a patch from another tool to the base tree, in the agent's sandbox, as swebench does.

The capture stage then takes the diff, so the grader gets git's own spelling whatever the patch's was.
"""

import hashlib

from perdure.agents.base import EXEC_ID, HOME
from perdure.errors import InstanceError, MissingDependency, NotFound, SandboxLost
from perdure.graders.diff.git_diff_parser import count_files
from perdure.graders.diff.patch_filter import MAX_BYTES
from perdure.graders.hidden_test_run import last_lines
from perdure.rollouts import agent_output
from perdure.rollouts.activity_messages import AgentRun
from perdure.rollouts.attempt_job import Job
from perdure.sandboxes.base import Exec, ExecState, Sandbox, shown_shortage
from perdure.storage import store_keys
from perdure.types import GIVEN_PATCHES, AgentEnd, PatchRef, SourceKind

COMMANDS = (
    "git apply --verbose",
    "git apply --verbose --3way",
    "git apply --verbose --reject",
    "patch --batch --forward --fuzz=5 -p1 -i",
)
"""What swebench 5.0.2 tries, in its order (`GIT_APPLY_CMDS`)."""
ALREADY_APPLIED = "git apply --check --reverse"
"""Its last resort, because a command that failed may have applied everything."""
PATCH = f"{HOME}/prediction.diff"
IGNORED = f"{HOME}/prediction.ignored"
"""The files that the patch adds although .gitignore excludes them; the capture takes them too."""
LIMIT_S = 300.0
NOT_FOUND = 127
"""Bash's exit code if a command does not exist."""

# Prints the command that applied the patch; the commands' own output goes to stderr. Two things
# differ from swebench: the index is refreshed, because `--3way` compares it with a tree that was
# copied, and `patch` leaves no `.orig` files.
APPLY = r"""
file=$1 ignored=$2 last=$3; shift 3
exec 3>&1 1>&2
export LC_ALL=C
git() { command git -c safe.directory='*' -c core.hooksPath=/dev/null -c core.fsmonitor=false "$@"; }
patch() { command patch --no-backup-if-mismatch "$@"; }
ignored() { git ls-files -oiz --exclude-standard | sort -z; }
applies() {
  echo "$ $1"
  $1 "$file" && printf %s "$1" >&3 && ignored | comm -z -13 "$ignored.before" - >"$ignored"
}
git update-index -q --refresh
ignored >"$ignored.before"
is_first=yes
for command; do
  [ $is_first ] || { git checkout -- .; git clean -fd; }
  is_first=
  applies "$command" && exit
  code=$?
done
applies "$last" || exit $code
"""


async def has_given_patch(job: Job) -> bool:
    """Whether another program made the rollout's patch, so that no agent starts."""
    if job.request.agent == GIVEN_PATCHES:
        return True
    key = store_keys.prediction(job.request)
    return bool(job.request.adopted_sha256) and await job.services.store.exists(key)


async def apply_prediction(job: Job, sandbox: Sandbox) -> AgentRun:
    """If no command applies the patch, that is its verdict, and the capture stage takes no diff.

    Raises: InstanceError if the store has no patch; MissingDependency if the sandbox has no `patch`;
    SandboxLost.
    """
    patch = await _stored(job)
    if not patch.strip():
        return _run(job, AgentEnd.FINISHED, "the prediction is empty")
    if len(patch) > MAX_BYTES:
        return await _unapplied(job, patch, f"patch_too_large: {len(patch)} bytes")
    await sandbox.put(PATCH, patch)
    argv = ("bash", "-c", APPLY, "apply", PATCH, IGNORED, ALREADY_APPLIED, *COMMANDS)
    await sandbox.start(EXEC_ID, Exec(argv, cwd=sandbox.workdir, timeout_s=LIMIT_S))
    status = await sandbox.wait(EXEC_ID)
    if status.state is ExecState.LOST or status.cause == "sandbox":
        raise SandboxLost(f"sandbox {sandbox.identity} died while it applied a prediction")
    if status.host_lacked:
        raise SandboxLost(f"while a prediction was applied, {shown_shortage(status)}")
    found = await agent_output.collect(sandbox, status, artifacts=())
    await agent_output.keep(job, found)
    if status.ok:
        command = found.stdout_tail.decode("utf-8", "replace")
        return _run(job, AgentEnd.FINISHED, f"applied by `{command}`", status.seconds)
    # In an image, a missing `patch` is a command that fails, as in swebench.
    if status.code == NOT_FOUND and job.instance.source.kind is not SourceKind.IMAGE:
        raise MissingDependency(
            "the sandbox has no `patch`, which may be needed to apply a prediction: on this host, "
            "apt-get install patch; elsewhere, add it to the sandbox's image or template"
        )
    by_git = found.stderr_tail.partition(f"\n$ {COMMANDS[1]}\n".encode())[0]
    said = "".join(last_lines(by_git, 1)) or str(status)
    return await _unapplied(job, patch, f"no command of swebench applies it: {said}"[:500])


async def _stored(job: Job) -> bytes:
    try:
        return (await job.services.store.get(store_keys.prediction(job.request))).data
    except NotFound as error:
        raise InstanceError(
            f"{job.request.workflow_id.removeprefix('rollout/')} has no prediction to apply"
        ) from error


async def _unapplied(job: Job, patch: bytes, why: str) -> AgentRun:
    given = PatchRef(
        key=store_keys.prediction(job.request),
        sha256=hashlib.sha256(patch).hexdigest(),
        size=len(patch),
        empty=False,
        files=count_files(patch),
        unapplied=why,
    )
    await job.write("patch.json", given)
    return _run(job, AgentEnd.GAVE_UP, "no command of swebench applies the prediction")


def _run(job: Job, end: AgentEnd, detail: str, seconds: float | None = None) -> AgentRun:
    taken = round(seconds or 0.0, 3)
    model = job.request.model if job.request.agent == GIVEN_PATCHES else ""
    return AgentRun(end=end, detail=detail, model=model, seconds=taken)
