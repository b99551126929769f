"""ReaperWorkflow: kills sandboxes without an owner. One schedule per host starts it."""

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.client import temporal_names
    from perdure.rollouts.activity_messages import SweepRequest
    from perdure.sandboxes.sandbox_reaper import SweepReport
    from workflows import activity_options
    from workflows.activity_redispatch import ordered


@workflow.defn(name=temporal_names.REAPER)
class ReaperWorkflow:
    @workflow.run
    async def run(self, host: str | None = None) -> SweepReport:
        options = activity_options.described(
            activity_options.sweep(host), f"sandboxes of {host or 'any host'}"
        )
        return await ordered("sweep_sandboxes", SweepRequest(), SweepReport, options)
