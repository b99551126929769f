"""The folder `datasets/` is data; the import name is Hugging Face's."""

import importlib.util
from pathlib import Path

from tests.checkout_paths import ROOT


def test_import_name_is_the_librarys() -> None:
    """`import datasets` imports the installed library, never the folder of recipes."""
    spec = importlib.util.find_spec("datasets")

    assert spec is not None
    assert spec.origin is not None
    assert "site-packages" in Path(spec.origin).parts


def test_folder_holds_no_python() -> None:
    """A .py file in `datasets/` would make the folder look like the library's package."""
    folder = ROOT / "datasets"

    assert list(folder.rglob("*.py")) == []
