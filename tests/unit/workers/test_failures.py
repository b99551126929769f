"""What Temporal is told of an error: its type decides what happens next."""

import pytest
from temporalio.exceptions import ApplicationError

from activities.failures import translated
from perdure.errors import DiskFull, PerdureError
from perdure.sandboxes.guest.sandbox import DiskTooSmall


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
    """`retry_on` of a request names SandboxLost; a run pauses for a ConfigurationError by its name."""

    async def work() -> None:
        raise error

    with pytest.raises(ApplicationError) as caught:
        await translated(work())

    assert (caught.value.type, caught.value.non_retryable) == (name, True)
