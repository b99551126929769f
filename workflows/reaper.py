"""ReaperWorkflow: kills sandboxes without an owner. One schedule per host starts it."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.client import names
    from perdure.rollouts.messages import SweepRequest
    from perdure.sandboxes.reaper import SweepReport
    from workflows import activity_options
    from workflows.orders import ordered


@workflow.defn(name=names.REAPER)
class ReaperWorkflow:
    @workflow.run
    async def run(self, host: str | None = None) -> SweepReport:
        options = activity_options.described(
            activity_options.sweep(host), f"sandboxes of {host or 'any host'}"
        )
        return await ordered("sweep_sandboxes", SweepRequest(), SweepReport, options)
