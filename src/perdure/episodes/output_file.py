"""Writes an output file that a user names: it replaces a regular file whole or not at all."""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from perdure.errors import ConfigurationError

STANDARD_OUTPUT = ("-", "/dev/stdout")


def is_standard_output(path: Path) -> bool:
    return str(path) in STANDARD_OUTPUT


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """The file gets its name once it is complete. A symlink stays, and its target is replaced.

    Raises: ConfigurationError for a folder, a device, a FIFO, or a path that cannot be written.
    """
    if is_standard_output(path):
        with tempfile.TemporaryFile() as held:
            yield held
            held.seek(0)
            shutil.copyfileobj(held, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        return
    check_output(path)
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = draft.open("wb")
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def check_output(path: Path) -> None:
    """Raises: ConfigurationError if the path exists and is not a regular file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a device, a FIFO or a socket"
        raise ConfigurationError(f"{path} is {what}: name a file, or `-` for standard output")
