"""The command in a message installs the missing package, however this copy was installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from perdure import installation
from perdure.errors import MissingDependency
from perdure.installation import command_for_extra, command_for_packages, service_folder
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_lifecycle
from tests.checkout_paths import ROOT


def test_in_a_checkout_uv_syncs_the_locked_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another folder the command names the project. It runs exactly as printed."""
    monkeypatch.chdir("/")
    command = command_for_extra("traces")

    assert command.endswith(f"sync --project {ROOT} --frozen --inexact --extra traces")
    dry = subprocess.run(
        f"{command} --dry-run --offline", shell=True, capture_output=True, check=False
    )
    assert dry.returncode == 0, dry.stderr


def test_a_copy_from_a_wheel_names_that_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Perdure is on no index, so pip gets the URL that this copy was installed from."""
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    about = tmp_path / "perdure-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: perdure\nVersion: 1\n")
    (about / "direct_url.json").write_text('{"url": "file:///w/perdure-1-py3-none-any.whl"}')
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    command = command_for_extra("serving")
    assert command.endswith(" 'perdure[serving] @ file:///w/perdure-1-py3-none-any.whl'")
    assert f"{sys.executable} " in command
    assert "pip install " in command


def test_an_installed_copy_has_the_service_inside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout has it at its root. `make build` runs the demo from a wheel."""
    assert service_folder() == ROOT

    monkeypatch.setattr(installation, "ROOT", tmp_path)
    assert service_folder() == ROOT / "src" / "perdure" / "service"


def test_a_copy_for_the_client_alone_says_what_a_stack_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`pip install perdure` without an extra, then `perdure up`."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name)
    )

    with pytest.raises(MissingDependency, match=r"add what a local stack needs: .*laptop"):
        stack_lifecycle.ensure_up(Settings(home=tmp_path), "", print)


def test_other_packages_go_into_this_environment(tmp_path: Path) -> None:
    """The printed command runs, even in an environment without pip."""
    dry = f"{command_for_packages('pytest')} --dry-run --no-index"
    done = subprocess.run(dry, shell=True, capture_output=True, check=False)

    assert done.returncode == 0, done.stderr
