"""What Temporal is told of an error: its type decides what happens next."""

import pytest
from temporalio.exceptions import ApplicationError

from activities.failures import translated
from perdure.errors import DiskFull


async def test_every_kind_of_lost_sandbox_is_told_as_one() -> None:
    """`retry_on` of a request names SandboxLost; a disk that its agent has filled is such a loss."""

    async def work() -> None:
        raise DiskFull("sandbox 'p-1' has no disk space left")

    with pytest.raises(ApplicationError) as caught:
        await translated(work())

    assert (caught.value.type, caught.value.non_retryable) == ("SandboxLost", True)
