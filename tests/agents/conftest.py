"""The stand of the agents' end-to-end tests; its tool cache outlives the run, so each is fetched once."""

from pathlib import Path

import pytest

from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.agent_stand import Stand
from tests.stack.running_stack import TOOLS


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    if missing := BubblewrapProvider(Settings(home=tmp_path / "boxes")).check():
        pytest.skip("; ".join(missing))
    return Stand(tmp_path, TOOLS)
