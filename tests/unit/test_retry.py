"""Calls that are repeated while their errors are transient."""

import pytest

from perdure import retry

PAUSES = (0.001, 0.002)


class Away(Exception):
    """What `call` raises until it succeeds."""


def failing(times: int) -> "list[Exception | str]":
    return [*(Away(str(number)) for number in range(times)), "done"]


async def asked(answers: "list[Exception | str]", **options: object) -> str:
    async def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return await retry.retry_call(call, Away, pauses=PAUSES, **options)  # type: ignore[arg-type]


async def test_it_asks_until_there_is_an_answer() -> None:
    """One more call follows each transient error."""
    assert await asked(failing(5)) == "done"


async def test_what_does_not_pass_is_raised_at_once() -> None:
    """The caller gets the first error that another call would not fix."""
    with pytest.raises(Away, match="0"):
        await asked(failing(5), passes=lambda error: False)


async def test_other_errors_are_not_caught() -> None:
    """Only the errors that the caller named are repeated."""
    with pytest.raises(ValueError, match="wrong"):
        await asked([ValueError("wrong"), "done"])


async def test_patience_ends_with_the_last_error() -> None:
    """If the other side asks for a pause longer than the patience, the error is raised at once."""
    busy = Away("busy")
    busy.retry_after = 60.0  # type: ignore[attr-defined]

    with pytest.raises(Away, match="busy"):
        await asked([busy, "done"], patience_s=1.0)
