"""The guest's records of commands: one folder each.

    execs/<id>/order     the command; the folder appears whole, by rename
    execs/<id>/pid       pid and start time of the supervisor; made once, so the command runs once
    execs/<id>/cause     why it was killed, written by the process that killed it
    execs/<id>/room      space reserved for the result, because the command may fill the disk
    execs/<id>/rc        the result, by rename; without it and without the supervisor: lost

Runs inside a remote sandbox with `guest`. Standard library only, Python 3.7 or later.
"""

from __future__ import annotations

import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from perdure.sandboxes.guest.in_sandbox import guest_files as files

    Answer = dict[str, Any]
else:  # in the sandbox it is in the folder of this file
    import guest_files as files


ROOM = 512
"""Bytes: more than any result."""


def known(exec_id: str) -> str:
    folder = files.state("execs", exec_id)
    if not os.path.isdir(folder):
        raise files.Refused("unknown", "never started")
    return folder


def order_of(folder: str) -> Answer:
    with open(os.path.join(folder, "order")) as file:
        found: Answer = json.load(file)
    return found


def extend(folder: str, timeout: float) -> None:
    if timeout > extended(folder):
        files.replace(os.path.join(folder, "limit"), str(timeout).encode())


def extended(folder: str) -> float:
    """The moved time limit, in seconds after the command's start; 0 if it was never moved."""
    try:
        with open(os.path.join(folder, "limit")) as file:
            return float(file.read())
    except FileNotFoundError:
        return 0.0


def process_of(folder: str) -> tuple[int, str] | None:
    try:
        with open(os.path.join(folder, "pid")) as file:
            fields = file.read().split()
    except FileNotFoundError:
        return None
    return (int(fields[0]), fields[1]) if len(fields) == 2 else None


def kept_process(name: str) -> tuple[int, str] | None:
    """`resident.lock`: the process that answers orders, as `guest_entry` wrote it. `forwarder`: the
    one that forwards to the proxy of the listed hosts, as `container_init` wrote it."""
    try:
        with open(files.state(name)) as file:
            fields = file.read().split()
    except FileNotFoundError:
        return None
    return (int(fields[0]), fields[1]) if len(fields) == 2 else None


def result_of(folder: str) -> Answer | None:
    try:
        with open(os.path.join(folder, "rc")) as file:
            found: Answer = json.load(file)
    except FileNotFoundError:
        return None
    return found


def hold_room(folder: str) -> None:
    with open(os.path.join(folder, "room"), "wb") as file:
        file.write(b" " * ROOM)


def save_result(folder: str, result: Answer) -> None:
    """Write the result into the space reserved for it, then rename the file."""
    room = os.path.join(folder, "room")
    with open(room, "r+b") as file:
        file.write(json.dumps(result).encode().ljust(ROOM))
    os.replace(room, os.path.join(folder, "rc"))


def claim(folder: str, cause: str) -> None:
    """Write why the command is killed. The first cause stays. On a full disk there is none."""
    try:
        with open(os.path.join(folder, "cause"), "x") as file:
            file.write(cause)
    except OSError as error:
        if not isinstance(error, FileExistsError) and error.errno not in files.FULL:
            raise


def cause_of(folder: str) -> str | None:
    try:
        with open(os.path.join(folder, "cause")) as file:
            return file.read()
    except FileNotFoundError:
        return None


def size(folder: str, name: str) -> int:
    try:
        return os.stat(os.path.join(folder, name)).st_size
    except FileNotFoundError:
        return 0
