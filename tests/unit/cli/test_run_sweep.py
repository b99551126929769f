"""The combinations of a sweep."""

import pytest

from perdure.cli.runs import run_sweep
from perdure.errors import ConfigurationError


def test_values_are_combined_in_the_order_of_the_options() -> None:
    found = run_sweep.combinations(['stop=["a,b"]', "stop=[]", "model=x,y"])

    assert found == [
        {"stop": '["a,b"]', "model": "x"},
        {"stop": '["a,b"]', "model": "y"},
        {"stop": "[]", "model": "x"},
        {"stop": "[]", "model": "y"},
    ]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["model"], "--vary model: write it as KEY=VALUE,VALUE"),
        (["model=a,"], "--vary model=a,: write it as KEY=VALUE,VALUE"),
        (["model=a,b", "model=a"], "--vary model: a value is given twice; leave one out"),
        ([f"seed={','.join(map(str, range(65)))}"], "--vary gives 65 runs: at most 64 are allowed"),
    ],
)
def test_values_that_give_no_sweep_are_refused(given: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        run_sweep.combinations(given)

    assert str(refused.value) == problem


def test_the_runs_share_the_concurrency_and_keep_the_other_options() -> None:
    given = {"agent": "nop", "assignments": ("a=1",), "concurrency": 9, "limit": 3}
    options = run_sweep.command_line(given, {"agent": "oracle", "model": "m"}, runs=4)

    assert options == {
        **{"agent": "oracle", "assignments": ("a=1", "model=m")},
        **{"concurrency": 2, "limit": 3},
    }
