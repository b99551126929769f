"""A trainer's wait survives the errors of a server that starts or stops."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from perdure.client import sdk
from perdure.client.temporal_client import DATA_CONVERTER
from perdure.types import RolloutRequest


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (RPCStatusCode.CANCELLED, "context canceled"),
        (RPCStatusCode.UNAVAILABLE, "connection refused"),
        (RPCStatusCode.UNKNOWN, "transport error"),
        (RPCStatusCode.INTERNAL, "h2 protocol error: error reading a body from connection"),
    ],
)
async def test_a_passing_trouble_is_waited_out(status: RPCStatusCode, message: str) -> None:
    """A call that the server cancels, or that dies with the server, is repeated, as is one that
    found no server."""
    answers = [RPCError(message, status, b""), "done"]

    async def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, RPCError):
            raise answer
        return str(answer)

    assert await sdk._durably(call) == "done"


async def test_a_lasting_status_is_told() -> None:
    """An error that a repetition does not fix is raised at once."""

    async def call() -> str:
        raise RPCError("no such workflow", RPCStatusCode.NOT_FOUND, b"")

    with pytest.raises(RPCError, match="no such workflow"):
        await sdk._durably(call)


class Server:
    """The client's start call with given answers, and the history of the started workflow."""

    data_converter = DATA_CONVERTER

    def __init__(self, *answers: Exception | str) -> None:
        self.answers = list(answers)

    async def start_workflow(self, *asked: Any, **named: Any) -> str:
        self.request = asked[1]
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def get_workflow_handle(self, workflow_id: str) -> SimpleNamespace:
        return SimpleNamespace(id=workflow_id, fetch_history_events=self._events)

    async def _events(self, *, page_size: int) -> AsyncIterator[HistoryEvent]:
        event = HistoryEvent()
        started = event.workflow_execution_started_event_attributes
        started.input.payloads.extend(await self.data_converter.encode([self.request]))
        yield event


REQUEST = RolloutRequest(run_id="r", instance="toy/one", agent="oracle")
NO_NAMESPACE = RPCError("Namespace default is not found.", RPCStatusCode.NOT_FOUND, b"")
AWAY = RPCError("connection refused", RPCStatusCode.UNAVAILABLE, b"")


@pytest.mark.parametrize("trouble", [NO_NAMESPACE, AWAY])
async def test_a_start_meets_a_server_that_begins(
    trouble: RPCError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start is repeated. If only its answer was lost, it counts as started, not as joined."""
    monkeypatch.setattr(sdk, "START_PAUSE_S", 0.0)
    lost = WorkflowAlreadyStartedError(REQUEST.workflow_id, "RolloutWorkflow")
    for last, joined in (("started", False), (lost, False)):
        perdure = sdk.Perdure(cast(Client, Server(trouble, last)))
        assert (await perdure.start_rollout(REQUEST)).joined is joined
    perdure = sdk.Perdure(cast(Client, Server(lost)))
    assert (await perdure.start_rollout(REQUEST)).joined


async def test_a_namespace_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk, "NAMESPACE_PATIENCE_S", -1.0)
    with pytest.raises(RPCError, match="Namespace default"):
        await sdk.Perdure(cast(Client, Server(NO_NAMESPACE, "started"))).start_rollout(REQUEST)
