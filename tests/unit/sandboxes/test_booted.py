"""What a keeper records about the sandbox that it has booted."""

import pytest

from perdure.sandboxes.host.host_processes import ProcessId
from perdure.sandboxes.host.sandbox_folder import Booted


@pytest.mark.parametrize(
    ("words", "booted"),
    [
        (
            "7 123 4001 70001 8 9\n",
            Booted(ProcessId(7, 123), (7, 8, 9), "http://127.0.0.1:4001", 70001),
        ),
        ("7 123 - - \n", Booted(ProcessId(7, 123), (7,), None, None)),
        ("0 0 - - \n", Booted(None, (), None, None)),
        ("", Booted(None, (), None, None)),
    ],
    ids=["all of it", "no gateway, no own user", "no namespaces", "the power failed"],
)
def test_the_words_of_a_keeper_are_read(words: str, booted: Booted) -> None:
    """The holder and its descendants, the gateway's address inside, and the commands' user."""
    assert Booted.of(words) == booted
