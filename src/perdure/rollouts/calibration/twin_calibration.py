"""Chooses the twins of a proved row, in the kind of sandbox that grades it."""

import itertools
from contextlib import AsyncExitStack

from perdure.errors import Boundary, InstanceError, RetryHere
from perdure.graders.hidden_test_run import SilentDuringTests
from perdure.graders.image.image_setup import set_up_image
from perdure.graders.twins.twin_selection import choose_twins
from perdure.instances import calibration_record, instance_catalog
from perdure.rollouts.activity_messages import Attempt, RowToConclude, RowTwins
from perdure.rollouts.attempt_job import ActivityAttempt, Job
from perdure.rollouts.grade_stage import grading_spec
from perdure.rollouts.sandbox.allowed_network import allowed_network
from perdure.rollouts.sandbox.sandbox_creation import create_sandbox
from perdure.rollouts.stage_services import Services
from perdure.sandboxes.base import Sandbox, identity_of
from perdure.types import CalibrationState, TwinDraw, distinct_twins


async def choose(
    services: Services, asked: RowToConclude, activity_attempt: ActivityAttempt, owner: str
) -> RowTwins:
    """Add the twins to the row's record, or the reason why it has none. `owner`: the workflow that
    owns the sandboxes, so that two calibrations of one row do not kill each other's.

    Raises: RetryHere, SandboxLost.
    """
    row = await instance_catalog.load(services.store, asked.row.instance)
    rollout = asked.row.rollout(asked.calibration, "oracle", 0)
    job = await Job.of(services, Attempt(request=rollout, attempt=1), activity_attempt, first=True)
    plan = job.grade_sandbox
    record = await calibration_record.read(services.store, row, plan.placement.provider)
    if record is None or record.state is not CalibrationState.PROVED:
        return RowTwins()
    proved = calibration_record.joined(row, record)
    timeout_s = rollout.grade_timeout_s or row.grading.timeout_s
    labels = {**job.labels("grade"), "rollout": owner}
    numbers = itertools.count(1)
    networks = AsyncExitStack()

    async def make(purpose: str) -> Sandbox:
        identity = identity_of(
            rollout.run_id, f"{owner}/{rollout.workflow_id}", "twins", next(numbers)
        )
        await plan.provider.kill(identity)  # an earlier try may have left it
        spec = await grading_spec(job, timeout_s, labels)
        sandbox = await create_sandbox(activity_attempt, plan.provider, spec, identity)
        await networks.enter_async_context(allowed_network(job, "grade", sandbox))
        if spec.tree is None:
            await set_up_image(sandbox, proved)
        return sandbox

    draws: tuple[TwinDraw, ...] = ()
    variants: tuple[str, ...] = ()
    canary = False
    try:
        async with networks:
            chosen = await choose_twins(
                proved,
                make,
                wanted=asked.calibration.twins,
                runs=asked.calibration.runs,
                timeout_s=timeout_s,
            )
        grading, without = chosen.instance.grading, chosen.report.without
        draws, canary = grading.twin_draws, grading.canary
        variants = chosen.report.variants
    except SilentDuringTests as error:  # here the code under test is the row's own
        raise RetryHere(str(error), boundary=Boundary.SANDBOX) from error
    except InstanceError as error:  # recorded, because otherwise each later start would try again
        without = dict.fromkeys(proved.grading.fail_to_pass, str(error))
    changed = {
        "twin_draws": draws,
        "without_twin": without,
        "variants": variants,
        "canary": canary,
    }
    await calibration_record.save(services.store, record.model_copy(update=changed))
    tests = {test for twin in distinct_twins(draws) for test in twin.tests}
    return RowTwins(tests=len(tests), without=len(without))
