"""Finds a trainer's own classes if it is installed; imports nothing of a trainer before that."""

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
        raise ImportError(f"{module} no longer has {name}: see docs/episodes.md")
    return getattr(loaded, name)
