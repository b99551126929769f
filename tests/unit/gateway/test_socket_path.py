"""A home whose sockets no process could open is refused with the fix."""

from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.gateway.http.listeners import LONGEST_PATH, check_path
from perdure.settings.tree import Settings


def test_a_home_that_is_too_long_is_told_by_how_much() -> None:
    check_path(Settings(home=Path("/short")).gateway_socket)
    longest = Path("/" + "h" * (LONGEST_PATH - 1))
    check_path(longest)

    with pytest.raises(ConfigurationError, match=r"PERDURE_HOME .* make it 2 bytes shorter"):
        check_path(Path(f"{longest}hh"))
