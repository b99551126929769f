"""The inputs of `python -m benchmarks.gradings --fixes`, and what it counts as a false alarm."""

import ast
import re

import pytest

from benchmarks.gradings import made_fixes
from benchmarks.gradings.false_alarms import REFUSED, RIGHT, kind_of
from perdure.types import Grade, Outcome, Rewards


def test_every_fix_is_another_module_that_compiles() -> None:
    """An edit that no longer fits gold is an error, not a fix that is silently skipped."""
    modules = made_fixes.fixed_modules()

    assert len(modules) > 40
    assert len(set(map(ast.dump, map(ast.parse, modules.values())))) == len(modules)
    with pytest.raises(ValueError, match="gold has 2 times"):
        made_fixes.edited("x = 1\nx = 1\n", "twice", "-x = 1\n+x = 2\n")


def test_the_contexts_are_sixty_different_tests() -> None:
    names = [
        (row.instance_id, name)
        for row in made_fixes.rows()
        for name in re.findall(rb"^\+ *(?:async )?def (test_\w+)", row.grading.test_patch, re.M)
    ]

    assert len(names) == len(set(names)) > 60


@pytest.mark.parametrize(
    ("official", "outcome", "kind"),
    [
        (Outcome.RESOLVED, Outcome.RESOLVED, RIGHT),
        (Outcome.UNRESOLVED, Outcome.UNRESOLVED, REFUSED),
        (Outcome.RESOLVED, Outcome.TAMPERED, "a twin passed"),
        (Outcome.RESOLVED, Outcome.UNRESOLVED, "unresolved in a run with twins"),
        (Outcome.TAMPERED, Outcome.TAMPERED, "tampered in the run of originals"),
        (Outcome.TIMEOUT, Outcome.TIMEOUT, "timeout in the run of originals"),
    ],
)
def test_a_false_alarm_is_a_guard_that_rejects_what_the_tests_accept(
    official: Outcome, outcome: Outcome, kind: str
) -> None:
    grade = Grade(outcome=outcome, rewards=Rewards(binary=0.0), official=official)

    assert kind_of(grade) == kind
