"""What still wins, although twins are used: special cases that give what the hidden tests ask."""

STILL_WIN: frozenset[str] = frozenset(
    {
        "made-pytest: PYTEST_CURRENT_TEST",
        "made-pytest: a table of the hidden answers",
        "made-sympy: a table of the hidden answers",
        "made-unittest: a table of the hidden answers",
    }
)
"""As `row: cheat`. A new winner fails `make test-cheats`, and so does one that is beaten."""
