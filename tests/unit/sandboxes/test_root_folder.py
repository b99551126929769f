"""The /etc that a sandbox of this host's programs sees."""

import os
from pathlib import Path

import pytest

from perdure.sandboxes.host.root_folder import write_etc


def test_programs_find_their_alternatives_and_certificates(tmp_path: Path) -> None:
    """Every link exists except those to manual pages, half of all files, which no program reads."""
    write_etc(tmp_path / "etc")
    for name in ("alternatives", "ssl/certs"):
        if not (host := Path("/etc", name)).is_dir():
            pytest.skip(f"this host has no {host}")
        wanted = {n for n in os.listdir(host) if (host / n).exists() and not n.endswith(".gz")}

        assert set(os.listdir(tmp_path / "etc" / name)) == wanted
