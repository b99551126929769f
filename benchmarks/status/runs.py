"""A stand-in for the run's workflow: it answers the query of `perdure status` after a wait."""

from typing import Any

from temporalio import workflow


@workflow.defn(name="RunWorkflow")
class StandIn:
    """Its request names the answer."""

    @workflow.init
    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    @workflow.run
    async def run(self, answer: dict[str, Any]) -> dict[str, Any]:
        await workflow.wait_condition(lambda: False)
        return answer

    @workflow.query
    def status(self) -> dict[str, Any]:
        return self._answer
