"""Translates Poetry's metadata, `[tool.poetry]`, for pip: groups of development dependencies."""

import re
from typing import Any

_OPERATOR = re.compile(r"^(===|==|~=|!=|<=|>=|<|>)\s*(?=\w)")
_RELEASE = re.compile(r"^v?(\d+(?:\.\d+)*)")


def groups(project: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The groups of a pyproject.toml by name, with Poetry's earlier `dev-dependencies` as `dev`."""
    poetry = _poetry(project)
    named = {name: group.get("dependencies", {}) for name, group in poetry.get("group", {}).items()}
    earlier = poetry.get("dev-dependencies")
    return {**({"dev": earlier} if earlier else {}), **named}


def python_of(project: dict[str, Any]) -> object:
    """The Python versions that the project accepts, in Poetry's syntax; None if it names none."""
    return _poetry(project).get("dependencies", {}).get("python")


def requirements(group: dict[str, Any]) -> list[str]:
    """A group's requirements for pip, without those from a folder, a repository or a URL."""
    found = []
    for name, given in group.items():
        for one in given if isinstance(given, list) else [given]:
            fields = {"version": one} if isinstance(one, str) else one
            if name != "python" and "version" in fields:
                found.append(_requirement(name, fields))
    return found


def _requirement(name: str, fields: dict[str, Any]) -> str:
    extras = f"[{','.join(fields['extras'])}]" if fields.get("extras") else ""
    marks = [f"python_version{_marked(clause)}" for clause in _clauses(fields.get("python", ""))]
    marks += [f"({fields['markers']})"] if fields.get("markers") else []
    marker = f"; {' and '.join(marks)}" if marks else ""
    return f"{name}{extras}{','.join(_clauses(fields['version']))}{marker}"


def _marked(clause: str) -> str:
    """`>=3.8` -> `>="3.8"`."""
    operator = _OPERATOR.match(clause)
    assert operator is not None
    return f'{operator[1]}"{clause[operator.end() :]}"'


def _clauses(constraint: str) -> list[str]:
    """pip's specifiers; empty for alternatives (`||`), which pip cannot express."""
    if "|" in constraint:
        return []
    return [said for part in constraint.split(",") for said in _specifiers(part.strip())]


def _specifiers(part: str) -> list[str]:
    release = _RELEASE.match(part.lstrip("^~ "))
    if part in ("", "*") or (release is None and not _OPERATOR.match(part)):
        return []
    if _OPERATOR.match(part):
        return [_OPERATOR.sub(r"\1", part)]
    assert release is not None
    numbers = [int(number) for number in release[1].split(".")]
    if part[0] == "^":
        fixed = next((at for at, number in enumerate(numbers) if number), len(numbers) - 1)
    elif part[0] == "~":
        fixed = min(1, len(numbers) - 1)
    else:
        return [f"=={part}"]
    below = [*numbers[:fixed], numbers[fixed] + 1]
    return [f">={part[1:].strip()}", f"<{'.'.join(map(str, below))}"]


def _poetry(project: dict[str, Any]) -> dict[str, Any]:
    found = project.get("tool", {}).get("poetry", {})
    return found if isinstance(found, dict) else {}
