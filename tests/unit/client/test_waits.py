"""A trainer's wait outlives what a server says as it ends or begins."""

import pytest
from temporalio.service import RPCError, RPCStatusCode

from perdure.client import api


@pytest.mark.parametrize("status", [RPCStatusCode.CANCELLED, RPCStatusCode.UNAVAILABLE])
async def test_a_passing_status_is_waited_out(status: RPCStatusCode) -> None:
    """A call that the server cancels is asked again, as one that found no server."""
    answers = [RPCError("context canceled", status, b""), "done"]

    async def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, RPCError):
            raise answer
        return str(answer)

    assert await api._durably(call) == "done"


async def test_a_lasting_status_is_told() -> None:
    """What asking again does not mend is raised at once."""

    async def call() -> str:
        raise RPCError("no such workflow", RPCStatusCode.NOT_FOUND, b"")

    with pytest.raises(RPCError, match="no such workflow"):
        await api._durably(call)
