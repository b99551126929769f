"""A test with one line changed, in any language: what a judge reads and what becomes a twin."""

from typing import Protocol

from perdure.types import Twin


class TestFile(Protocol):
    """A test file in any language."""

    data: bytes

    def line(self, number: int) -> bytes: ...


class Lines(Protocol):
    """The first and the last line of a test; 1-based."""

    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...


class ChangedLine(Protocol):
    """A line of a test and its replacement. `old` and `new` are the expressions that differ."""

    @property
    def function(self) -> Lines: ...
    @property
    def line(self) -> int: ...
    @property
    def before(self) -> bytes: ...
    @property
    def after(self) -> bytes: ...
    @property
    def rule(self) -> str: ...
    @property
    def old(self) -> bytes: ...
    @property
    def new(self) -> bytes: ...
    @property
    def changes_form(self) -> bool: ...


def as_twin(change: ChangedLine, path: str, tests: tuple[str, ...], *, weak: bool) -> Twin:
    return Twin(
        tests=tests,
        path=path,
        line=change.line,
        before=change.before,
        after=change.after,
        rule=change.rule,
        weak=weak,
    )
