"""Temporary folders in the home. Each new one also removes the folders of killed processes."""

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from perdure.settings.settings_loader import load_settings


@contextmanager
def scratch(purpose: str) -> Iterator[Path]:
    """An empty folder, removed when the context ends."""
    root = load_settings().home.absolute() / "scratch"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = root / f"{purpose}-{uuid4().hex[:12]}"
    with contextlib.ExitStack() as stack:
        with (root / ".lock").open("w") as all_of_them:
            fcntl.flock(all_of_them, fcntl.LOCK_EX)
            _remove_left(root)
            held = stack.enter_context(_lock_of(folder).open("w"))
            fcntl.flock(held, fcntl.LOCK_EX)
            folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            _lock_of(folder).unlink(missing_ok=True)


def _remove_left(root: Path) -> None:
    """Remove the folders of dead processes, whose locks the kernel has freed."""
    for path in root.glob("*.lock"):
        if path.name == ".lock":
            continue
        with contextlib.suppress(BlockingIOError, FileNotFoundError), path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink()


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")
