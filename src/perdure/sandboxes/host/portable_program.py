"""A program of this host with its libraries, for sandboxes whose image lacks it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

WRAPPER = "wrapper"
"""The file of the folder that starts the program."""
_SCRIPT = """#!/bin/sh
exec {target}/loader --library-path {target}/lib --argv0 {name} {target}/{name} "$@"
"""
"""The loader finds the libraries of this host, whatever the image's libc is."""
_LIBRARY = re.compile(r"(/\S+) \(0x")


def write_program(program: str, folder: Path, target: str) -> None:
    """Copy a program, its libraries and its loader to `folder`, which sandboxes mount at `target`.

    Raises: FileNotFoundError, subprocess.CalledProcessError if it cannot be copied.
    """
    name = Path(program).name
    (folder / "lib").mkdir(parents=True)
    shutil.copy(os.path.realpath(program), folder / name)
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for path in map(Path, _LIBRARY.findall(listed)):
        loader = path.name.startswith("ld-")
        shutil.copy(path, folder / ("loader" if loader else f"lib/{path.name}"))
    (folder / WRAPPER).write_text(_SCRIPT.format(target=target, name=name))
    for executable in (name, "loader", WRAPPER):
        (folder / executable).chmod(0o755)
