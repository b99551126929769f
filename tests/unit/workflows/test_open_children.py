"""Which open children learn that their run's budget is used up."""

import asyncio
from collections.abc import Generator
from typing import Any, cast

from perdure.client import temporal_names
from workflows.child_rollouts import Child, OpenChildren


class Played:
    """A child workflow that has started, and that ends when it is told to."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.told: list[str] = []
        self.ends = asyncio.Event()

    async def signal(self, name: str, *, args: list[Any]) -> None:
        self.told.append(name)

    def __await__(self) -> Generator[Any, None, None]:
        return self._result().__await__()

    async def _result(self) -> None:
        await self.ends.wait()


async def test_open_children_and_those_whose_start_was_under_way_are_told() -> None:
    """A start that was requested before the budget was used up returns after it. Ended children are
    left alone."""
    open_children, ended, early, late = (
        OpenChildren(),
        Played("ended"),
        Played("early"),
        Played("late"),
    )
    ended.ends.set()
    await open_children.result_of(cast(Child, ended))
    waiting = [asyncio.create_task(open_children.result_of(cast(Child, early)))]
    await asyncio.sleep(0)  # `early` is open now
    await open_children.stop()
    waiting.append(asyncio.create_task(open_children.result_of(cast(Child, late))))
    early.ends.set()
    late.ends.set()
    await asyncio.gather(*waiting)

    assert (ended.told, early.told, late.told) == (
        [],
        [temporal_names.SPENT],
        [temporal_names.SPENT],
    )
