"""A host's term: when sandboxes may be booted, and which terms are over."""

from pathlib import Path

import pytest

from perdure.errors import RetryHere
from perdure.rollouts.sandbox.host_term import HostTerm, end_terms_before, first_term
from perdure.storage.local_store import LocalStore

LONG_S, NO_TIME_S = 3600.0, 0.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "term"


def test_a_home_without_signs_of_life_refuses_nothing(path: Path) -> None:
    """Workers of remote sandboxes and tests need no heartbeat process."""
    term = HostTerm(path, LONG_S)
    term.check()

    assert (term.number, term.is_confirmed) == (0, True)


def test_a_confirmed_term_boots_sandboxes(path: Path) -> None:
    """Sandboxes may boot for as long as the server would not declare the host lost."""
    HostTerm(path, LONG_S).confirm()

    assert HostTerm(path, LONG_S).is_confirmed
    assert not HostTerm(path, NO_TIME_S).is_confirmed


def test_a_new_term_boots_nothing_before_it_is_confirmed(path: Path) -> None:
    """Other workers may still answer for the host, so a boot is retried."""
    term = HostTerm(path, LONG_S)
    term.begin(3)
    with pytest.raises(RetryHere, match="boots no sandbox"):
        term.check()
    term.confirm()

    assert (term.number, term.is_confirmed) == (3, True)


def test_a_host_that_left_boots_nothing(path: Path) -> None:
    """The term lapses when the host leaves."""
    term = HostTerm(path, LONG_S)
    term.confirm()
    term.lapse()

    assert not term.is_confirmed


async def test_the_store_knows_which_terms_are_over(tmp_path: Path) -> None:
    """The store records this separately for each host."""
    store = LocalStore(tmp_path / "store")
    await end_terms_before(store, "host-1", 2)

    assert (await first_term(store, "host-1"), await first_term(store, "host-2")) == (2, 0)
