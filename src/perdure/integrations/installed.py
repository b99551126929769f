"""The trainers' own classes where they are installed. Nothing of a trainer is imported before asked."""

import importlib
from typing import Any


def find(module: str, name: str) -> Any | None:
    """The class, or None when its package is not installed.

    Raises: ImportError when it is installed and broken, or no longer has the class.
    """
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.partition(".")[0]:
            return None
        raise
    if not hasattr(loaded, name):
        raise ImportError(f"{module} has no {name} any more: see docs/episodes.md")
    return getattr(loaded, name)
