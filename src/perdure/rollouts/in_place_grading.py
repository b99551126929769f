"""Runs the tests in the agent's own sandbox, if the instance's grading is `in_place`.

The capture stage calls this once the diff is taken, because the sandbox then ends. The grade stage
reads the result. Tests change what they see, so they never run twice in one sandbox.
"""

from perdure import tracing
from perdure.data_source_handlers import JobDetails, parse_verdict, wrap_hook_call
from perdure.errors import AttemptDamaged, NotFound, SandboxLost
from perdure.graders.base import Graded
from perdure.rollouts.activity_messages import AgentRun
from perdure.rollouts.attempt_job import Job
from perdure.rollouts.boot_stage import init_metadata
from perdure.rollouts.sandbox.allowed_network import allowed_network
from perdure.sandboxes.base import Sandbox
from perdure.types import Grade, Outcome

RESULT, STARTED, LOG = "in-place.json", "in-place-started.txt", "in-place.log"
"""Files of an attempt."""


async def run_in_place(job: Job, sandbox: Sandbox) -> None:
    """Run the tests and store their result, unless the agent's run broke or a reward model replaces
    the tests.

    Raises: AttemptDamaged if tests that began earlier left no result; SandboxLost; RetryHere.
    """
    run, model = await job.read("agent.json", AgentRun), job.request.reward_model
    if (run is not None and run.broke) or (model is not None and model.replaces_tests):
        return
    if await job.read(RESULT, Grade) is not None:
        return
    store = job.services.store
    if not await store.put_if_absent(job.key(STARTED), b""):
        raise AttemptDamaged(
            "the tests began in the agent's sandbox and left no result; a new attempt replays the "
            "recorded turns"
        )
    graded = await _tested(job, sandbox)
    if graded.unreached and graded.grade.outcome is not Outcome.RESOLVED:
        raise SandboxLost(f"the tests could not reach {', '.join(sorted(graded.unreached))}")
    await store.put(job.key(LOG), graded.log)
    await job.write(RESULT, graded.grade)


async def _tested(job: Job, sandbox: Sandbox) -> Graded:
    instance = job.instance
    handler = job.services.handler(instance.data_source)
    details = JobDetails(
        job_id=job.request.workflow_id,
        instance=instance,
        runtime=sandbox,
        metadata=await init_metadata(job),
        run_results={"git_patch": b""},  # the tree has the agent's changes already
        timeout_s=job.request.grade_timeout_s or instance.grading.timeout_s,
    )
    # the graders look for a repository, which the agent may have removed
    repository = f"{sandbox.workdir}/.git"
    await sandbox.exec(["mkdir", "-p", "--", repository], cwd="/", check=True)
    async with allowed_network(job, "agent", sandbox) as asked:
        with (
            tracing.span("run tests", {"perdure.handler": handler.name}),
            wrap_hook_call(handler, "eval", sandbox),
        ):
            answer = await handler.eval(details, sid=f"eval_{details.job_id}", allow_skip=False)
        return parse_verdict(handler, answer)._replace(unreached=frozenset(asked.unreachable))


async def in_place_result(job: Job) -> Graded:
    """Raises: AttemptDamaged if there is none."""
    grade = await job.read(RESULT, Grade)
    try:
        log = (await job.services.store.get(job.key(LOG))).data
    except NotFound:
        log = b""
    if grade is None:
        raise AttemptDamaged("the tests in the agent's sandbox left no result")
    return Graded(grade, log)
