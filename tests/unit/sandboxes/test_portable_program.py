"""A program of this host runs on its own copies of its libraries."""

import re
import shutil
import subprocess
from pathlib import Path

from perdure.sandboxes.host.portable_program import WRAPPER, write_program


def test_a_copy_needs_no_library_of_the_image(tmp_path: Path) -> None:
    """All that it maps is in its folder, so the image may have another libc or none."""
    folder = tmp_path / "cat"
    write_program(str(shutil.which("cat")), folder, str(folder))
    argv = [str(folder / WRAPPER), "/proc/self/maps"]
    maps = subprocess.run(argv, capture_output=True, text=True, check=True, env={}).stdout
    mapped = set(re.findall(r"(/\S+\.so[.\d]*|/\S+/(?:cat|loader))$", maps, re.MULTILINE))

    assert {Path(path).parent for path in mapped} == {folder, folder / "lib"}
