"""Calls of services whose SDK loses a cancellation."""

import asyncio

import pytest

from perdure.sandboxes.guest.service_retries import cancellable


async def test_a_lost_cancellation_is_raised() -> None:
    """Whether the SDK goes on, or turns the cancellation into an error of its own."""
    for swallowed in (None, OSError("connection closed")):

        async def call(error: Exception | None = swallowed) -> str:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if error is not None:
                    raise error from None
            return "went on"

        task = asyncio.create_task(cancellable(call))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_calls_after_a_cancellation_still_work() -> None:
    """A cancelled task that cleans up calls the service again."""

    async def call() -> str:
        return "killed"

    async def work() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return await cancellable(call)
        return ""

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()

    assert await task == "killed"
