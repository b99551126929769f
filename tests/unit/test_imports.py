"""Names that begin with an underscore stay in their module. import-linter cannot see names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "activities", "workflows", "workers")
OURS = {"perdure", "activities", "workflows", "workers"}


def foreign_private_names(source: str) -> list[str]:
    """Private names of other Perdure modules that this source imports, or reads from a module."""
    tree = ast.parse(source)
    imported: dict[str, str] = {}
    found = []
    for module, name, alias in _imports(tree):
        if module.partition(".")[0] not in OURS:
            continue
        imported[alias] = f"{module}.{name}" if name else module
        if _is_private(name):
            found.append(f"{module}.{name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = imported.get(node.value.id)
            if owner is not None and _is_private(node.attr):
                found.append(f"{owner}.{node.attr}")
    return found


def _imports(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Module, name, and local alias. The name is empty for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                yield node.module, one.name, one.asname or one.name
        elif isinstance(node, ast.Import):
            for one in node.names:
                yield one.name, "", one.asname or one.name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_no_module_uses_a_private_name_of_another() -> None:
    """A name that two modules need is public, in a module that both may import."""
    found = {
        str(path.relative_to(ROOT)): names
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (names := foreign_private_names(path.read_text()))
    }

    assert found == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from perdure.storage.s3_store import _key", ["perdure.storage.s3_store._key"]),
        (
            "from perdure.storage import s3_store\ns3_store._key()",
            ["perdure.storage.s3_store._key"],
        ),
        (
            "from perdure.storage import s3_store as store\nstore._key()",
            ["perdure.storage.s3_store._key"],
        ),
        ("from os import _exit", []),
        ("from perdure import __version__", []),
        ("def _key(): ...\n_key()", []),
    ],
)
def test_the_check_sees_each_way_to_use_one(source: str, found: list[str]) -> None:
    """The check reports imports of private names and reads from an imported module."""
    assert foreign_private_names(source) == found
