"""Finds the root folders workers/, workflows/ and activities/, which the wheel does not contain."""

from pathlib import Path

import perdure
from perdure.errors import MissingDependency

NEEDED = ("workers/__main__.py", "workflows/__init__.py", "activities/__init__.py")


def find_root() -> Path:
    """The checkout that service processes run from: the current folder or one above it, otherwise the
    folder of the editable install.

    Raises: MissingDependency, which says how to get a checkout.
    """
    here = Path.cwd()
    installed = Path(str(perdure.__file__)).resolve().parents[2]
    for root in (here, *here.parents, installed):
        if all((root / name).is_file() for name in NEEDED):
            return root
    raise MissingDependency(
        f"the wheel does not contain the workers, and {here} is not a checkout of perdure: "
        "run this inside a clone of the repository, or use the container image"
    )
