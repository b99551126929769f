"""What must not be committed by mistake."""

import subprocess

import pytest

from tests.checkout_paths import ROOT

LARGEST = 512 << 10
LARGE = {"uv.lock"}


def test_no_large_file_is_committed() -> None:
    """Wheels, recordings and results stay out: everybody's clone would carry them for ever."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    names = listed.stdout.decode().split("\0")[:-1]
    present = [name for name in names if (ROOT / name).is_file()]
    large = {name for name in present if (ROOT / name).stat().st_size > LARGEST}

    assert len(present) > 1000
    assert large == LARGE
