"""Finds a trainer's own classes if the trainer is installed, and imports no trainer before."""

import importlib
from typing import Any


def find(module: str, name: str) -> Any | None:
    """The class, or None if its package is not installed.

    Raises: ImportError if the package is broken or no longer has the class.
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
