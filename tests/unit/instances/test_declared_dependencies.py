"""Reads what a tree's tests need from its metadata, without running its code."""

import datetime
from pathlib import Path

import pytest

from perdure.errors import InstanceError
from perdure.instances.recipes import declared_dependencies

NOW = datetime.datetime(2024, 3, 5, tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("requires", "version", "accepted"),
    [
        ("", "3.8", True),
        (">=3.8", "3.8", True),
        (">=3.8.1", "3.8", True),
        (">3.8", "3.8", False),
        (">=3.7,<3.12", "3.12", False),
        (">=3.7,<=3.12", "3.12", True),
        ("<4,>=2.7,!=3.0.*,!=3.9.*", "3.9", False),
        ("!=3.9.1", "3.9", True),
        ("~=3.9", "3.12", True),
        ("~=3.9", "3.8", False),
        ("==3.11.*", "3.11", True),
        ("==3.11.*", "3.12", False),
        (">=3.9; something", "3.8", True),
    ],
)
def test_a_specifier_accepts(requires: str, version: str, accepted: bool) -> None:
    """Specifiers mean what they mean to `packaging`; unknown forms are left to the installer."""
    assert declared_dependencies.accepts(requires, version) is accepted


@pytest.mark.parametrize(
    ("requires", "day", "version"),
    [
        (">=3.8", "2024-01-01", "3.11"),
        (">=3.12", "2024-01-01", "3.12"),
        (">=3.8", "2021-01-01", "3.9"),
        (">=3.8,<3.9", "2024-01-01", "3.8"),
        (">=3.12", "2020-01-01", "3.12"),
    ],
)
def test_the_interpreter_fits_project_and_day(
    requires: str, day: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perdure's own if it fits, otherwise the newest of that day, otherwise the oldest later one."""
    monkeypatch.setattr(declared_dependencies, "find_python", lambda _: Path("/usr"))

    assert (
        declared_dependencies.choose_python(requires, datetime.date.fromisoformat(day)) == version
    )


def test_an_interpreter_that_is_not_here_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next fitting one is used; without any, the error is the finder's own."""

    def find(version: str) -> Path:
        if version != "3.10":
            raise InstanceError(f"no Python {version}")
        return Path("/usr")

    monkeypatch.setattr(declared_dependencies, "find_python", find)

    assert declared_dependencies.choose_python("", NOW.date()) == "3.10"
    with pytest.raises(InstanceError, match=r"no Python 3\.12"):
        declared_dependencies.choose_python(">=3.11,<3.13", NOW.date())
    with pytest.raises(InstanceError, match="accepts none of"):
        declared_dependencies.choose_python("<3", NOW.date())


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "pytest -e ."),
        ({"requirements/test.txt": "x"}, "pytest -e . -r requirements/test.txt"),
        ({"setup.cfg": "[options.extras_require]\ntesting =\n  x\n"}, "pytest -e '.[testing]'"),
        (
            {"pyproject.toml": "[project.optional-dependencies]\ndev = []\ntests = []\n"},
            "pytest -e '.[tests]'",
        ),
        ({"pyproject.toml": "[dependency-groups]\ntest = ['x']\n"}, "pytest -e . --group test"),
        ({"PKG-INFO": "Provides-Extra: docs\nProvides-Extra: tests\n"}, "pytest -e '.[tests]'"),
        (
            {"tox.ini": "[testenv]\ndeps =\n  mock<5\n  attrs[x]\n  -r{toxinidir}/a\n  py: b\n"},
            "pytest -e . 'mock<5' 'attrs[x]'",
        ),
        ({"pyproject.toml": "not toml"}, "pytest -e ."),
        (
            {
                "pyproject.toml": "[tool.poetry.group.docs.dependencies]\nsphinx = '*'\n"
                "[tool.poetry.group.test.dependencies]\n"
                "pytest = '^7.2'\nmock = {version = '~1.2.3', extras = ['all', 'x']}\n"
                "old = {version = '1.*', python = '>=3.8,<3.9', markers = 'os_name == \"nt\"'}\n"
                "local = {path = '../local'}\npython = '^3.8'\n"
            },
            "pytest -e . 'pytest>=7.2,<8' 'mock[all,x]>=1.2.3,<1.3' "
            '\'old==1.*; python_version>="3.8" and python_version<"3.9" and (os_name == "nt")\'',
        ),
        (
            {
                "pyproject.toml": "[tool.poetry.dev-dependencies]\n"
                "a = '^0.2.3'\nb = '1.4'\nc = '>=1,!=1.5'\nd = '~2'\ne = '^0.0.3'\n"
                "f = '^1 || ^2'\ng = [{version = '1.0', python = '<3.8'}, '^2']\nh = '*'\n"
            },
            "pytest -e . 'a>=0.2.3,<0.3' b==1.4 'c>=1,!=1.5' 'd>=2,<3' 'e>=0.0.3,<0.0.4' f "
            "'g==1.0; python_version<\"3.8\"' 'g>=2,<3' h",
        ),
    ],
)
def test_requirements_of_tests_are_found(files: dict[str, str], words: str, tmp_path: Path) -> None:
    """They come from an extra, a group or a requirements file with a usual name."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    install = declared_dependencies.environment_at(tmp_path, NOW, "1").install

    assert install[1].endswith(f"2024-03-05T00:00:00Z {words}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", "[project]\nrequires-python = '>=3.9'\n"),
        ("pyproject.toml", "[tool.poetry.dependencies]\npython = '^3.9'\n"),
        ("setup.cfg", "[options]\npython_requires = >=3.9\n"),
        ("setup.py", "setup(\n    python_requires='>=3.9',\n)\n"),
        ("PKG-INFO", "Metadata-Version: 2.1\nRequires-Python: >=3.9\n\nWords.\n"),
    ],
)
def test_requires_python_is_read(name: str, text: str, tmp_path: Path) -> None:
    """It is read from every place in which projects write it."""
    (tmp_path / name).write_text(text)

    assert declared_dependencies.requires_python(tmp_path) == ">=3.9"


def test_a_tree_of_earlier_days_is_built_by_a_setuptools_that_can(tmp_path: Path) -> None:
    """Before September 2022, setuptools did not support uv's editable installs."""
    then = datetime.datetime(2021, 3, 5, tzinfo=datetime.UTC)
    install = declared_dependencies.environment_at(tmp_path, then, "1").install

    assert (
        "2021-03-05T00:00:00Z --exclude-newer-package setuptools=2022-09-01T00:00:00Z" in install[1]
    )
