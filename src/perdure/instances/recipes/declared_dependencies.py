"""Reads from a tree's metadata what its tests need: extras, groups, requirements files, an
interpreter. It runs none of the tree's code.
"""

import configparser
import datetime
import email.message
import email.parser
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perdure.errors import InstanceError
from perdure.instances.recipes import poetry_metadata
from perdure.instances.row_interpreter import find_python
from perdure.types import Environment

NAMES = ("test", "tests", "testing", "dev")
"""Extras and groups with the requirements of tests, the best first."""
FILES = (
    "requirements-test.txt",
    "requirements-tests.txt",
    "requirements_test.txt",
    "test-requirements.txt",
    "test_requirements.txt",
    "requirements/test.txt",
    "requirements/tests.txt",
    "requirements/testing.txt",
    "tests/requirements.txt",
    "test/requirements.txt",
    "requirements-dev.txt",
    "dev-requirements.txt",
    "requirements/dev.txt",
)
RELEASED = {
    "3.8": datetime.date(2019, 10, 14),
    "3.9": datetime.date(2020, 10, 5),
    "3.10": datetime.date(2021, 10, 4),
    "3.11": datetime.date(2022, 10, 24),
    "3.12": datetime.date(2023, 10, 2),
    "3.13": datetime.date(2024, 10, 7),
    "3.14": datetime.date(2025, 10, 7),
}
PREFERRED = "3.11"
EDITABLE = datetime.datetime(2022, 9, 1, tzinfo=datetime.UTC)
"""Earlier releases of setuptools do not support the editable install that uv needs."""
_CLAUSE = re.compile(r"^(~=|==|!=|<=|>=|<|>)\s*v?(\d+(?:\.\d+)*)(\.\*)?$")
_REQUIREMENT = re.compile(r"^[A-Za-z0-9][\w.-]*(\[[\w,-]+\])?\s*([<>=!~][\w<>=!~.,*\s]*)?$")
_IN_SETUP = re.compile(r"python_requires\s*=\s*[\"']([^\"']+)[\"']")


def environment_at(
    tree: Path, moment: datetime.datetime, version: str, *, requires: Sequence[str] | None = None
) -> Environment:
    """The environment: an editable install of the tree and its test requirements, as published by
    `moment`.

    `version`: the version for a tree that asks git. `requires`: the requirements of its tests;
    None: pytest, and those that its metadata names. Raises: InstanceError when no interpreter fits.
    """
    wanted = _asked(tree) if requires is None else [*map(shlex.quote, requires), "-e", "."]
    python = choose_python(requires_python(tree), moment.date())
    if moment < EDITABLE:
        wanted = [f"--exclude-newer-package setuptools={_written(EDITABLE)}", *wanted]
    return Environment(
        python=python,
        install=(
            f"uv venv -q --python python{python} $VENV",
            f"uv pip install -q --exclude-newer {_written(moment)} {' '.join(wanted)}",
        ),
        env={"SETUPTOOLS_SCM_PRETEND_VERSION": version, "PDM_BUILD_SCM_VERSION": version},
    )


def _written(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def choose_python(requires: str, day: datetime.date) -> str:
    """A version that starts on this host, that the project accepts, and that was released by `day`.
    If there is none, the oldest later one. Raises: InstanceError."""
    accepted = [version for version in RELEASED if accepts(requires, version)]
    if not accepted:
        raise InstanceError(f"requires-python {requires!r} accepts none of {', '.join(RELEASED)}")
    known = [version for version in reversed(accepted) if RELEASED[version] <= day]
    known.sort(key=lambda version: version != PREFERRED)
    later = [version for version in accepted if version not in known]
    for version in (*known, *later):
        try:
            find_python(version)
        except InstanceError as error:
            problem = error
        else:
            return version
    raise problem


def accepts(requires: str, version: str) -> bool:
    """Whether a specifier such as `>=3.8,!=3.9.*` accepts the newest patch release of `version`."""
    return all(_fits(clause.strip(), version) for clause in requires.split(",") if clause.strip())


def requires_python(tree: Path) -> str:
    """The version specifier in the tree's metadata; empty if it has none."""
    project = _pyproject(tree)
    found = project.get("project", {}).get("requires-python") or poetry_metadata.python_of(project)
    found = found or _setup_cfg(tree).get("options", "python_requires", fallback="")
    if not found and (tree / "setup.py").is_file():
        match = _IN_SETUP.search((tree / "setup.py").read_text("utf-8", "replace"))
        found = match[1] if match else ""
    found = found or _published(tree).get("Requires-Python", "")
    return re.sub(r"\^", ">=", found) if isinstance(found, str) else ""


def _fits(clause: str, version: str) -> bool:
    parsed = _CLAUSE.match(clause)
    if parsed is None:
        return True  # an unknown form: the install fails if the version does not fit
    operator, bound, any_patch = parsed.groups()
    own, limit = _numbers(version)[:2], _numbers(bound)
    if operator in (">=", "~="):
        return own >= limit[:2] and (operator == ">=" or own[0] == limit[0])
    if operator == ">":
        return own > limit[:2] or (own == limit[:2] and len(limit) > 2)
    if operator == "<":
        return own < limit[:2]
    if operator == "<=":
        return own <= limit[:2]
    same = own[: len(limit)] == limit[:2] and (bool(any_patch) or len(limit) <= 2)
    return same if operator == "==" else not same


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _asked(tree: Path) -> list[str]:
    project = _pyproject(tree)
    extra = _first(_extras(tree, project))
    group = _first(project.get("dependency-groups", {}))
    file = next((name for name in FILES if (tree / name).is_file()), None)
    words = ["pytest", "-e", f"'.[{extra}]'" if extra else "."]
    poetrys = poetry_metadata.groups(project)
    if group:
        words += ["--group", group]
    elif kind := _first(poetrys):
        words += map(shlex.quote, poetry_metadata.requirements(poetrys[kind]))
    elif file and not extra:
        words += ["-r", file]
    elif not extra:
        words += map(shlex.quote, _of_tox(tree))
    return words


def _of_tox(tree: Path) -> list[str]:
    """The plain requirements in tox's `deps`: those without a factor, an option or a variable."""
    deps = _ini(tree / "tox.ini").get("testenv", "deps", fallback="")
    return [line.strip() for line in deps.splitlines() if _REQUIREMENT.match(line.strip())]


def _first(names: object) -> str | None:
    return next((name for name in NAMES if isinstance(names, dict) and name in names), None)


def _extras(tree: Path, project: dict[str, Any]) -> dict[str, Any]:
    config = _setup_cfg(tree)
    section = "options.extras_require"
    declared = dict(config.items(section)) if config.has_section(section) else {}
    given = project.get("project", {}).get("optional-dependencies", {})
    built = dict.fromkeys(_published(tree).get_all("Provides-Extra", []))
    return {**built, **declared, **(given if isinstance(given, dict) else {})}


def _pyproject(tree: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((tree / "pyproject.toml").read_text())
    except (OSError, ValueError):
        return {}


def _published(tree: Path) -> email.message.Message:
    """The metadata in a source distribution, which also has the values that setup.py computed."""
    try:
        text = (tree / "PKG-INFO").read_text("utf-8", "replace")
    except OSError:
        text = ""
    return email.parser.HeaderParser().parsestr(text)


def _setup_cfg(tree: Path) -> configparser.RawConfigParser:
    return _ini(tree / "setup.cfg")


def _ini(file: Path) -> configparser.RawConfigParser:
    config = configparser.RawConfigParser(strict=False)
    try:
        config.read(file, "utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return configparser.RawConfigParser()
    return config
