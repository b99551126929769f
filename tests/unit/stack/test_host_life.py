"""What a worker refuses to start with: without signs of life, its host would never give a seat."""

from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.settings.tree import Settings
from perdure.stack import host_life


def test_a_home_whose_sockets_no_process_could_open_is_refused() -> None:
    host_life.check(Settings(home=Path("/short")))

    with pytest.raises(ConfigurationError, match="PERDURE_HOME is too long"):
        host_life.check(Settings(home=Path("/") / ("h" * 100)))
