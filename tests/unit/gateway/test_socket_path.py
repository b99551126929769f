"""A home whose path is too long for unix sockets is refused with the fix."""

from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.gateway.http.listening_sockets import LONGEST_PATH, check_path
from perdure.settings.settings_tree import Settings


def test_the_error_says_by_how_much_a_home_is_too_long() -> None:
    check_path(Settings(home=Path("/short")).gateway_socket)
    longest = Path("/" + "h" * (LONGEST_PATH - 1))
    check_path(longest)

    with pytest.raises(ConfigurationError, match=r"PERDURE_HOME .* make it 2 bytes shorter"):
        check_path(Path(f"{longest}hh"))
