"""The scripted engine of a stack that has ended is in no roster."""

import asyncio
from pathlib import Path

import pytest

from perdure.engines.engine_roster import add_engine
from perdure.engines.engine_state import EngineSpec
from perdure.settings.settings_tree import Settings
from perdure.stack.engine_presence import forget_scripted, home_roster
from perdure.stack.stack_state import StackState

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("engine", "left"), [("scripted:policy.json", 0), (URL, 1)], ids=["scripted", "a user's"]
)
def test_only_the_stacks_own_engine_is_taken_out(tmp_path: Path, engine: str, left: int) -> None:
    """A later weight update would try to pause it; an engine that a user named stays."""
    settings = Settings(home=tmp_path)
    asyncio.run(add_engine(home_roster(settings), EngineSpec(URL), "policy"))
    state = StackState(
        status="ready",
        pid=1,
        started=1,
        temporal_address="",
        namespace="default",
        ui_url="",
        gateway_url="",
        engine=engine,
        engine_settings={"url": URL},
    )
    forget_scripted(settings, state)

    assert len(asyncio.run(home_roster(settings).read()).engines) == left
