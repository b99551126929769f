"""A row's interpreter is one that starts, wherever it is installed."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.errors import InstanceError
from perdure.instances import row_interpreter
from perdure.instances.row_interpreter import find_python

PROGRAM = """#!/bin/sh
[ "$1" = -I ] || exit 3
printf '%s\\n9.8.7\\n' {prefix}
"""
SHIM = """#!/bin/sh
echo "pyenv: python9.8: command not found" >&2
exit 127
"""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other interpreter on this host, no pyenv, and no download."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("UV_OFFLINE", "1")
    row_interpreter.find_python.cache_clear()
    yield
    row_interpreter.find_python.cache_clear()


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o755)


def test_a_shim_that_starts_nothing_hides_no_interpreter(tmp_path: Path) -> None:
    """uv stops at pyenv's shim; Perdure finds the newest interpreter behind it."""
    program(tmp_path / "shims" / "python9.8", SHIM)
    program(tmp_path / "pyenv/versions/9.8.6/bin/python", SHIM)
    program(tmp_path / "pyenv/versions/9.8.7/bin/python", PROGRAM.format(prefix="/opt/nine"))

    assert find_python("9.8") == Path("/opt/nine")


def test_another_patch_release_is_not_taken(tmp_path: Path) -> None:
    """A row that names `9.8.5` gets no other patch release."""
    program(tmp_path / "shims" / "python9.8", PROGRAM.format(prefix="/opt/nine"))

    assert find_python("9.8.7") == Path("/opt/nine")
    with pytest.raises(InstanceError, match=r"no Python 9\.8\.5 starts"):
        find_python("9.8.5")


def test_without_one_the_message_says_where_it_looked(tmp_path: Path) -> None:
    """The message also says why uv cannot install one."""
    program(tmp_path / "shims" / "python9.8", SHIM)

    with pytest.raises(InstanceError) as caught:
        find_python("9.8")

    assert f"{tmp_path / 'pyenv/versions'}" in str(caught.value)
    assert "cannot install it: " in str(caught.value)


def test_perdures_own_version_is_its_own_interpreter() -> None:
    """Perdure does not search for another one."""
    assert find_python(".".join(map(str, sys.version_info[:2]))) == Path(sys.base_prefix)
