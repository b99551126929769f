"""Classifies a changed file by its path: a test, packaging and prose, or code."""

import shlex
from collections.abc import Iterable
from pathlib import PurePosixPath

from perdure.instances.recipes import changelog

TEST_FOLDERS = {"test", "tests"}
TOP_TEST_FOLDERS = {"testing", "t"}
PACKAGING = {
    "MANIFEST.in",
    "PKG-INFO",
    "_version.py",
    "noxfile.py",
    "pyproject.toml",
    "setup.cfg",
    "setup.py",
    "tox.ini",
}
"""Files of a release, not of a fix. The environment is built from the base's versions."""
PROSE_FOLDERS = {"doc", "docs", "requirements", "examples"}
CACHES = {"__pycache__", ".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache"}
CACHED = {".pyc", ".pyo"}


def is_test(path: str) -> bool:
    """Test by folder or file name, as pytest and its users name tests."""
    *folders, name = PurePosixPath(path).parts
    if is_cache(path):
        return False
    if TEST_FOLDERS & set(folders) or (folders and folders[0] in TOP_TEST_FOLDERS):
        return True
    return (
        name in ("conftest.py", "tests.py") or name.startswith("test_") or name.endswith("_test.py")
    )


def is_metadata(path: str) -> bool:
    """Packaging, changelogs, documentation, settings of developer tools, caches."""
    *folders, name = PurePosixPath(path).parts
    top = (folders or [name])[0]
    return (
        is_cache(path)
        or name in PACKAGING
        or any(folder.endswith((".egg-info", ".dist-info")) for folder in folders)
        or top.startswith(".")
        or top in PROSE_FOLDERS
        or (not folders and PurePosixPath(name).suffix in ("", ".md", ".rst", ".txt"))
        or changelog.is_changelog(path)
    )


def is_cache(path: str) -> bool:
    """An interpreter or a tool generates the file, so it belongs in no patch."""
    pure = PurePosixPath(path)
    return bool(CACHES & set(pure.parts)) or pure.suffix in CACHED


def is_test_module(path: str) -> bool:
    """pytest collects the file if the command names it."""
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test") or name.endswith("_test.py"))


def pytest_command(changed: Iterable[str]) -> str:
    """pytest on the test modules among these files; empty if there is none."""
    modules = sorted(path for path in changed if is_test_module(path))
    return f"pytest -rA {shlex.join(modules)}" if modules else ""
