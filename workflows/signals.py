"""Drops signals that a person sent with missing or surplus arguments.

The SDK drops those that it cannot decode. Without this, a wrong number of arguments would fail the workflow
task for ever.
"""

import inspect

from temporalio import workflow
from temporalio.worker import HandleSignalInput, WorkflowInboundInterceptor


class CheckedSignals(WorkflowInboundInterceptor):
    async def handle_signal(self, input: HandleSignalInput) -> None:
        for function in vars(type(workflow.instance())).values():
            definition = getattr(function, "__temporal_signal_definition", None)
            if definition is None or definition.name != input.signal:
                continue
            try:
                inspect.signature(function).bind(workflow.instance(), *input.args)
            except TypeError as error:
                workflow.logger.warning("signal %s is dropped: %s", input.signal, error)
                return
        await super().handle_signal(input)
