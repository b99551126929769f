"""How errors are translated for Temporal: the type decides what happens next."""

import errno
import os
import re

import pytest
from temporalio.exceptions import ApplicationError

from activities.activity_errors import translated
from perdure.errors import DiskFull, PerdureError
from perdure.sandboxes.guest.guest_sandbox import DiskTooSmall


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (DiskFull("sandbox 'p-1' has no disk space left"), "SandboxLost"),
        (DiskTooSmall("the template's disk is full"), "ConfigurationError"),
    ],
)
async def test_a_kind_of_error_goes_by_the_name_that_is_known(
    error: PerdureError, name: str
) -> None:
    """`retry_on` of a request names SandboxLost, and a run pauses for a ConfigurationError by
    name."""

    async def work() -> None:
        raise error

    with pytest.raises(ApplicationError) as caught:
        await translated(work())

    assert (caught.value.type, caught.value.non_retryable) == (name, True)


CODES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENOSPC, errno.EROFS, errno.EIO)


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(code, os.strerror(code)) for code in CODES),
        RuntimeError("can't start new thread"),
    ],
)
async def test_what_the_host_refuses_a_worker_is_tried_again(error: Exception) -> None:
    """It is retried for as long as the stage may take, not only as often as a bug."""

    async def work() -> None:
        raise error

    with pytest.raises(ApplicationError, match=re.escape(str(error))) as caught:
        await translated(work())

    assert (caught.value.type, caught.value.non_retryable) == ("RetryHere", False)
