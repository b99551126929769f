"""SWE-bench rows of schema 4: they name a repository and a version, and swebench 4 knew the rest.

The values come from `swebench.harness.constants.python` in swebench 4.1.0; swebench 5 removed it.
"""

import re
from typing import NamedTuple

from perdure.instances.rows import published_scripts
from perdure.instances.rows.row_fields import Row

INSTALL = "python -m pip install -e ."
PYTEST = "pytest -rA"
ASTROPY_OLD = "pytest -rA -vv -o console_output_style=classic --tb=no"
DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
SYMPY = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose"
UTF_8 = ("export LANG=en_US.UTF-8", "export LC_ALL=en_US.UTF-8")
LOCALES = "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen"
ENTER = (
    "set -uxo pipefail",
    "source /opt/miniconda3/bin/activate",
    "conda activate testbed",
    "cd /testbed",
)
"""The first lines of each script: they enter the image's environment and tree."""
NOT_TESTS = (
    ".json",
    ".png",
    "csv",
    ".txt",
    ".md",
    ".jpg",
    ".jpeg",
    ".pkl",
    ".yml",
    ".yaml",
    ".toml",
)
"""Suffixes of files in a test patch that are not arguments of the test runner."""


class Spec(NamedTuple):
    parser: str
    test_cmd: str = PYTEST
    install: str = INSTALL


SPECS = {
    "astropy/astropy": Spec("astropy", install="python -m pip install -e .[test] --verbose"),
    "django/django": Spec("django", DJANGO),
    "marshmallow-code/marshmallow": Spec("marshmallow", install=f"{INSTALL[:-1]}'.[dev]'"),
    "matplotlib/matplotlib": Spec("matplotlib"),
    "mwaskom/seaborn": Spec("seaborn", "pytest --no-header -rA", f"{INSTALL}[dev]"),
    "pallets/flask": Spec("flask"),
    "psf/requests": Spec("requests", install="python -m pip install ."),
    "pvlib/pvlib-python": Spec("pvlib", install=f"{INSTALL}[all]"),
    "pydata/xarray": Spec("xarray"),
    "pydicom/pydicom": Spec("pydicom"),
    "pylint-dev/astroid": Spec("astroid"),
    "pylint-dev/pylint": Spec("pylint"),
    "pytest-dev/pytest": Spec("pytest"),
    "pyvista/pyvista": Spec("pyvista"),
    "scikit-learn/scikit-learn": Spec(
        "scikit", install="python -m pip install -v --no-use-pep517 --no-build-isolation -e ."
    ),
    "sphinx-doc/sphinx": Spec("sphinx", "tox --current-env -epy39 -v --", f"{INSTALL}[test]"),
    "sqlfluff/sqlfluff": Spec("sqlfluff"),
    "sympy/sympy": Spec("sympy", SYMPY),
}


def is_schema_4(row: Row) -> bool:
    return row.has("version") and not row.has("eval_script") and not row.has("test_cmd")


def fields_of(row: Row) -> dict[str, str]:
    """`test_cmd` and `log_parser`, as swebench 4 derived them.

    Raises: InstanceError for a repository whose rows need schema 5.
    """
    repo, version = row.optional_text("repo"), row.optional_text("version")
    spec = SPECS.get(repo)
    if spec is None:
        raise row.lacks(
            "eval_script",
            f"for {repo or 'this repository'} take the row from a revision of the dataset that has "
            "`eval_script` and `log_parser` (schema 5), or add `test_cmd`",
        )
    test_cmd = spec.test_cmd
    prepare: tuple[str, ...] = (spec.install,)
    if repo == "astropy/astropy" and re.match(r"[01]\.", version):
        test_cmd = ASTROPY_OLD
    if repo == "django/django":
        test_cmd, prepare = _django(version)
    if repo == "matplotlib/matplotlib":
        prepare = (_matplotlib(version),)
    if (repo, version) == ("mwaskom/seaborn", "0.11"):
        prepare = (INSTALL,)
    before = "\n".join([*ENTER, *prepare])
    tests = " ".join([test_cmd, *test_files(row)])
    return {
        "test_cmd": published_scripts.command(before, tests),
        "log_parser": f"parse_log_{spec.parser}",
    }


def _django(version: str) -> tuple[str, tuple[str, ...]]:
    test_cmd = DJANGO.partition(" --settings")[0] if version == "1.9" else DJANGO
    major = version.partition(".")[0]
    if version in ("1.4", "1.5", "1.6"):
        return test_cmd, ("python setup.py install",)
    if major in ("1", "2"):
        more = ("export PYTHONIOENCODING=utf8", "export LANGUAGE=en_US:en")
        return test_cmd, (*UTF_8, *more, "python setup.py install")
    if major == "3":
        return test_cmd, (LOCALES, UTF_8[0], "export LANGUAGE=en_US:en", UTF_8[1], INSTALL)
    return test_cmd, (INSTALL,)


def _matplotlib(version: str) -> str:
    if version in ("3.8", "3.9"):
        return 'python -m pip install --no-build-isolation -e ".[dev]"'
    old = version.startswith(("1.", "2."))
    return "python setup.py build; python setup.py install" if old else INSTALL


def test_files(row: Row) -> list[str]:
    """The files of the test patch, as the runner's arguments."""
    patch = row.patch("test_patch").decode("utf-8", "surrogateescape")
    files = [
        f for f in re.findall(r"^diff --git a/.* b/(.*)", patch, re.M) if not f.endswith(NOT_TESTS)
    ]
    if row.optional_text("repo") != "django/django":
        return files
    return [file.removesuffix(".py").removeprefix("tests/").replace("/", ".") for file in files]
