"""Drops signals that a user sent with missing or surplus arguments.

The SDK itself drops only signals that it cannot decode. A wrong number of arguments would fail the
workflow task forever.
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
