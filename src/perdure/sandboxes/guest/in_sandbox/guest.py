"""Runs inside a remote sandbox: durable commands and one set-up. Standard library, Python 3.7 or later.

The host installs it with the other files of this folder, and calls it through the provider's exec
(`guest_entry`). Every call names one operation, may be repeated after a lost answer, and prints one
marked line.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from perdure.sandboxes.guest.in_sandbox import guest_commands as commands
    from perdure.sandboxes.guest.in_sandbox import guest_files as files

    Answer = dict[str, Any]
else:  # in the sandbox they are in the folder of this file
    import guest_commands as commands
    import guest_files as files


MARK = "perdure-answer:"
UPLOAD_OPERATIONS = ("begin", "place", "ready", "unpack")
"""Operations that write what the host sends."""


def answer(argument: str) -> str:
    """Execute one order and return the line to print. `argument`: `call:` and the order in base64
    or, if that is too long for a command line, `order:` and the name of a file that holds it."""
    name, _, encoded = argument.partition(":")
    data = base64.b64decode(encoded)
    if name == "order":
        with open(data.decode(), "rb") as file:
            data = file.read()
    call = json.loads(data)
    op = call.pop("op")
    try:
        found = OPERATIONS[op](**call)
    except files.Refused as error:
        found = {"refused": error.kind, "message": str(error)}
    except OSError as error:
        found = {"refused": refusal(op, error.errno), "message": str(error)}
    return f"\n{MARK}{json.dumps(found)}\n"


def refusal(op: str, code: int | None) -> str:
    """The kind of refusal. Commands may use up processes (busy) or the disk (full). A disk too
    small for our uploads is a configuration error (os)."""
    if code in files.PASSING:
        return "busy"
    return "full" if code in files.FULL and op not in UPLOAD_OPERATIONS else "os"


def begin(targets: list[str], settings: Answer | None) -> Answer:
    """The first step of the set-up, and the last if none of `targets` is missing.

    `settings`: the order of `ready`, unless the host sends it in a separate call.
    """
    if os.path.exists(files.state("ready")):
        return {"ready": True}
    missing = [target for target in targets if not unpacked(target)]
    if missing or settings is None:
        return {"ready": False, "missing": missing}
    ready(**settings)
    return {"ready": True}


def unpack(staged: str, target: str, sha256: str, agent_owned: bool) -> Answer:
    """Unpack an uploaded archive at `target`, once. `agent_owned`: the agent owns its files."""
    import tarfile  # imported late: few calls need it

    with files.locked("setup"):
        done = files.state("unpacked", hashlib.sha256(target.encode()).hexdigest())
        if os.path.exists(done):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(staged)
            return {}
        files.verify(staged, sha256)
        files.make_folder(target, agent_owned)
        with tarfile.open(staged) as tar:
            tar.extraction_filter = lambda member, path: (
                member
            )  # the archive is ours; Python 3.14's default filter would change its members
            for member in tar:
                member.uid, member.gid = files.owner() if agent_owned else (0, 0)
                member.uname = member.gname = ""
                tar.extract(member, target, numeric_owner=True)
        os.unlink(staged)
        files.replace(done, sha256.encode())
    return {}


def unpacked(target: str) -> bool:
    """Whether `target` is there, unpacked or as a read-only folder of the template."""
    if os.path.exists(files.state("unpacked", hashlib.sha256(target.encode()).hexdigest())):
        return True
    return os.path.isdir(target) and bool(os.listdir(target)) and not os.access(target, os.W_OK)


def ready(  # noqa: PLR0917
    workdir: str,
    home: str,
    env: dict[str, str],
    output: int,
    seal: dict[str, str] | None = None,
    room: int = 0,
) -> Answer:
    """The last step of the set-up: save what every later command needs.

    `room`: bytes of the disk to reserve until `end_all`. `seal`: system-call filters by machine.
    With it, commands have no capabilities and run under this machine's filter, if there is one.
    """
    with files.locked("setup"):
        for path in (workdir, home):
            files.make_folder(path, True)
        if not os.path.exists(files.state("ready")):
            if room:
                files.hold_room(room)
            meta = {"workdir": workdir, "env": env, "output": output, "seal": seal}
            files.replace(files.state("ready"), json.dumps(meta).encode())
    return {}


def touch(ttl: float) -> Answer:
    """Set the deadline to `ttl` seconds from now, for a first process that enforces it."""
    files.replace(files.state("deadline"), f"{time.time() + ttl} {time.monotonic() + ttl}".encode())
    return {}


OPERATIONS: dict[str, Any] = {
    "begin": begin,
    "end_all": commands.end_all,
    "extend": commands.extend,
    "output": commands.output,
    "place": files.place,
    "poll": commands.poll,
    "read": files.read_file,
    "ready": ready,
    "run": commands.run,
    "signal": commands.send_signal,
    "start": commands.start,
    "touch": touch,
    "unpack": unpack,
    "wait": commands.wait,
}
