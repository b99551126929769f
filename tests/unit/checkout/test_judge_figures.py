"""What `benchmarks.judge` counts as a win, and from which rows its learned judge learns."""

import string
from collections.abc import Callable
from random import Random

from benchmarks.judge.judges import out_of_sample, win_rate, wins
from benchmarks.judge.twin_pools import TwinCase, shown
from perdure.graders.twins.expectation_mutation import candidates
from perdure.graders.twins.parsed_test_file import Source

Spelling = Callable[[str], str]


def case(package: str, number: int, original: Spelling, twin: Spelling) -> TwinCase:
    """A test that expects one of two words of its file, and a twin that expects the other."""
    letters = Random(f"{package} {number}").sample(string.ascii_lowercase, 12)
    one, other = original("".join(letters[:6])), twin("".join(letters[6:]))
    text = f"WORDS = ['{one}', '{other}']\n\n\ndef test_x():\n    assert f() == '{one}'\n"
    source = Source("tests/test_x.py", text.encode(), frozenset((5,)))
    found = candidates(source, source.functions[0])
    exchange = next(each for each in found if each.new == f"'{other}'".encode())
    before, after = (shown(source, exchange, each) for each in (exchange.before, exchange.after))
    return TwinCase(f"{package}-1.0", package, True, before, after)


def test_a_coin_wins_a_quarter() -> None:
    coin = Random(1)
    one = case("a", 1, str.lower, str.lower)

    rate, low, high = win_rate([wins(lambda _: coin.random() < 0.5, one) for _ in range(2000)])

    assert abs(rate - 0.25) < 0.03
    assert low < 0.25 < high


def test_a_judge_that_always_says_the_same_never_wins() -> None:
    one = case("a", 1, str.lower, str.lower)

    assert not wins(lambda _: True, one)
    assert not wins(lambda _: False, one)
    assert wins(lambda text: text is one.original, one)


def test_a_regularity_of_all_rows_is_learned() -> None:
    """Originals are in lowercase and twins in capitals, in words that no other row has."""
    cases = [case(package, n, str.lower, str.upper) for package in "abc" for n in range(10)]

    judges = out_of_sample(cases)

    assert all(wins(judges[one.row], one) for one in cases)


def test_a_judge_learns_nothing_from_the_row_that_it_judges() -> None:
    """Row a has a regularity, and the few cases of row b have the opposite one."""
    own = [case("a", n, str.lower, str.upper) for n in range(30)]
    others = [case("b", n, str.upper, str.lower) for n in range(5)]

    judges = out_of_sample([*own, *others])

    assert not any(wins(judges["a-1.0"], one) for one in own)
    assert not any(wins(judges["b-1.0"], one) for one in others)
