"""Turns an exception into one line that says what went wrong and how to fix it."""

import errno
import os
import shutil

import click

from perdure.errors import ActionNeeded, InstanceError, PerdureError

USAGE, FAILURE = 2, 1
FULL = "the disk under {} is full: free space there, then repeat the command"


def explain(error: Exception) -> tuple[int, str]:
    """The exit code and one line for any exception."""
    from pydantic import ValidationError

    from perdure.types.validation_errors import faults

    if isinstance(error, click.ClickException):
        return error.exit_code, error.format_message()
    if isinstance(error, ValidationError):
        return USAGE, faults(error)
    if isinstance(error, PerdureError):
        if (full := _full_disk(error)) is not None:
            return FAILURE, FULL.format(full)
        code = USAGE if isinstance(error, ActionNeeded | InstanceError) else FAILURE
        return code, str(error)
    if (full := _full_disk(error)) is not None:
        return FAILURE, FULL.format(full)
    if type(error).__name__ == "RPCError":
        return FAILURE, f"Temporal refused: {str(error)[:300]}"
    told = (
        f"{type(error).__name__}: {error} (a bug in Perdure; PERDURE_DEBUG=1 shows the traceback)"
    )
    return FAILURE, told


def _full_disk(error: BaseException | None) -> str | None:
    """The file that the full disk had no room for. shutil.Error lists every file of a failed copy."""
    while error is not None:
        if isinstance(error, shutil.Error) and os.strerror(errno.ENOSPC) in str(error):
            return str(error.args[0][0][1])
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return str(error.filename or "the home or the store")
        error = error.__cause__
    return None
