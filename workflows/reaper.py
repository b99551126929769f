"""ReaperWorkflow: on a schedule, one per host (or provider account): kills what nobody owns."""

from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from perdure.client import names
    from perdure.rollouts.messages import SweepRequest, Swept
    from workflows import policies


@workflow.defn(name=names.REAPER)
class ReaperWorkflow:
    @workflow.run
    async def run(self, host: str | None = None) -> Swept:
        swept: Any = await workflow.execute_activity(
            "sweep_sandboxes",
            SweepRequest(),
            result_type=Swept,
            **policies.described(policies.sweep(host), f"sandboxes of {host or 'any host'}"),
        )
        assert isinstance(swept, Swept)
        return swept
