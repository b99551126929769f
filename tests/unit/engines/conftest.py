"""The event loops of these tests."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The tests of connections run on both loops: gateways run on uvloop, whose transports differ
    from asyncio's."""
    loops = {"asyncio": asyncio.new_event_loop}
    return (
        loops | {"uvloop": uvloop.new_event_loop}
        if item.path.name == "test_hosted_requests.py"
        else loops
    )
