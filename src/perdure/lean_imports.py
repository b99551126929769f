"""Imports without what a library takes only because it is installed.

For programs that live long and of which a host runs several: an import holds for its whole process.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

TERMINAL = ("rich", "pygments", "click")


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Within, these modules are not installed, except those that have been imported before."""
    missing = _Missing(names)
    sys.meta_path.insert(0, missing)
    try:
        yield
    finally:
        sys.meta_path.remove(missing)


def for_no_terminal(*names: str) -> None:
    """Import modules without what they want for a terminal.

    structlog wants rich for its tracebacks, httpx rich and click for a command of its own: 4 and 6 MB.
    """
    with without(*TERMINAL):
        for name in names:
            importlib.import_module(name)


class _Missing:
    """A finder to which some modules are not installed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"{name} is left out", name=name)
