"""Plays the `apptainer` program on hosts without it: its documented command lines, nothing else.

`write_program(folder)` puts it on a PATH. Instances are bubblewrap sandboxes over an overlay that it
mounts; an unknown command or option is refused as cobra does. The real Apptainer may behave differently.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

VERSION = "apptainer version 1.4.1"
SWITCHES = (
    "containall", "cleanenv", "no-home", "userns", "no-privs", "net", "writable-tmpfs", "no-umask",
)  # fmt: skip
VALUES = ("network", "hostname", "overlay", "workdir", "pid-file", "pwd")


def write_program(folder: Path) -> Path:
    """`folder/apptainer`, which runs this module."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "apptainer"
    root = Path(__file__).parents[2]
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m tests.doubles.apptainer_cli "$@"\n'
    )
    path.chmod(0o755)
    return path


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"Error for command {self.prog!r}: {message}")


def main(arguments: Sequence[str]) -> None:
    parser = _Parser(prog="apptainer", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    build = commands.add_parser("build", allow_abbrev=False)
    build.add_argument("--sandbox", action="store_true", required=True)
    build.add_argument("target", type=Path)
    build.add_argument("source")
    run = _with_options(commands.add_parser("exec", allow_abbrev=False))
    run.add_argument("image")
    run.add_argument("argv", nargs=argparse.REMAINDER)
    instance = commands.add_parser("instance", allow_abbrev=False)
    verbs = instance.add_subparsers(dest="verb", required=True, parser_class=_Parser)
    start = _with_options(verbs.add_parser("start", allow_abbrev=False))
    start.add_argument("image", type=Path)
    start.add_argument("name")
    listing = verbs.add_parser("list", allow_abbrev=False)
    listing.add_argument("--json", action="store_true")
    listing.add_argument("name", nargs="?", default="")
    stop = verbs.add_parser("stop", allow_abbrev=False)
    stop.add_argument("--signal", default="TERM")
    stop.add_argument("--timeout", type=float, default=10)
    stop.add_argument("name")
    given = parser.parse_args(arguments)
    verb = f"instance {given.verb}" if given.command == "instance" else given.command
    commands_by_name: dict[str, Callable[[argparse.Namespace], None]] = {
        "build": _build,
        "exec": _exec,
        "instance start": _start,
        "instance list": _list,
        "instance stop": _stop,
    }
    commands_by_name[verb](given)


def _with_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name in VALUES:
        parser.add_argument(f"--{name}")
    parser.add_argument("--bind", action="append", default=[])
    return parser


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"FATAL:   {message}\n")
    raise SystemExit(255)


# -- images ---------------------------------------------------------------------------------------


def _build(given: argparse.Namespace) -> None:
    """The image of `docker://NAME`: `$APPTAINER_DOUBLE_IMAGES/NAME` instead of a registry."""
    name = given.source.removeprefix("docker://")
    images = os.environ.get("APPTAINER_DOUBLE_IMAGES")
    if name == given.source or images is None:
        _fail(f"While performing build: unable to reach {given.source}: no such host")
    with open(Path(images) / "asked", "a") as file:
        file.write(f"{name}\n")
    source = Path(images) / name.replace("/", "+")
    if not source.is_dir():
        _fail(f"While performing build: conveyor failed to get: manifest unknown: {name}")
    shutil.copytree(source, given.target, symlinks=True)


# -- instances ------------------------------------------------------------------------------------


def _start(given: argparse.Namespace) -> None:
    if _read(given.name) is not None:
        _fail(f"container cleanup failed: instance {given.name} already exists")
    if not given.image.is_dir():
        _fail(f"While checking container encryption: could not open image {given.image}")
    if given.network not in (None, "none") or (given.network and not given.net):
        _fail("Network type must be none, with --net")
    if given.userns and given.no_privs:
        _fail("--no-privs: root only")
    told, tell = os.pipe()
    command = _in_mounts(given, _bwrap(given, info=tell))
    with open(f"{given.pid_file}.log" if given.pid_file else os.devnull, "w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[tell],
            start_new_session=True,
            env={"PATH": os.environ["PATH"]},
        )
    os.close(tell)
    said = b""
    while not said.rstrip().endswith(b"}"):
        piece = os.read(told, 4096)
        if not piece:
            _fail(f"container creation failed: exit code {process.wait()}")
        said += piece
    pid = int(json.loads(said)["child-pid"])
    _wait_until_up(pid, process)
    if given.pid_file:
        Path(given.pid_file).write_text(str(pid))
    record = {"instance": given.name, "pid": pid, "img": str(given.image), "ip": ""}
    (_folder() / given.name).write_text(json.dumps(record))
    sys.stderr.write("INFO:    instance started successfully\n")


def _wait_until_up(pid: int, process: "subprocess.Popen[bytes]") -> None:
    """Wait for the root folder: bubblewrap reports the pid before it is in place."""
    while True:
        if process.poll() is not None:
            _fail(f"container creation failed: exit code {process.returncode}")
        with contextlib.suppress(OSError):  # one of them ended just now
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            if any(Path(f"/proc/{child}/comm").read_text() == "sleep\n" for child in children):
                return
        time.sleep(0.002)


def _list(given: argparse.Namespace) -> None:
    found = [
        r
        for path in _folder().iterdir()
        if (r := _read(path.name)) and given.name in ("", path.name)
    ]
    if given.json:
        print(json.dumps({"instances": found}))
        return
    print("INSTANCE NAME    PID    IP    IMAGE")
    for record in found:
        print(f"{record['instance']}    {record['pid']}        {record['img']}")


def _stop(given: argparse.Namespace) -> None:
    record = _read(given.name)
    if record is None:
        _fail(f"no instance found with name {given.name}")
    number = getattr(signal, f"SIG{given.signal.removeprefix('SIG')}")
    for signum, seconds in ((number, given.timeout), (signal.SIGKILL, 5.0)):
        try:
            os.kill(record["pid"], signum)
        except ProcessLookupError:
            break
        if _ended(record["pid"], seconds):
            break
    (_folder() / given.name).unlink(missing_ok=True)


def _ended(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def _exec(given: argparse.Namespace) -> None:
    """Run it in new namespaces over a folder, or in those of a running instance."""
    name = given.image.removeprefix("instance://")
    if name == given.image:
        command = [*_bwrap(given, info=None)[:-3], *given.argv]
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "APPTAINER_CONTAINER": given.image}
        env |= _variables(Path(given.image))
        settings = [p for name, value in env.items() for p in ("--setenv", name, value)]
        at = command.index("--")
        os.execvp(command[0], [*command[:at], *settings, *command[at:]])
    record = _read(name)
    if record is None:
        _fail(f"no instance found with name {name}")
    join = ("nsenter", "--target", str(record["pid"]), "--all", "--root", "--wd")
    os.execvp(join[0], [*join, *given.argv])


def _variables(image: Path) -> dict[str, str]:
    """The image's variables: lines `export NAME=value` in `.singularity.d/env/90-environment.sh`."""
    path = image / ".singularity.d/env/90-environment.sh"
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.removeprefix("export ").split("=", 1) for line in lines)


def _bwrap(given: argparse.Namespace, *, info: int | None) -> list[str]:
    """The arguments of bwrap. The last three are the program that it runs."""
    root = f"{given.overlay}/merged" if given.overlay else str(given.image)
    session = Path(given.workdir or "/nonexistent")
    command = [
        "bwrap",
        *(["--unshare-user"] if given.userns else []),
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
    ]
    command += ["--unshare-cgroup", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin"]
    command += ["--unshare-net"] if given.net else []
    command += ["--hostname", given.hostname] if given.hostname else []
    command += ["--bind" if given.overlay else "--ro-bind", root, "/"]
    command += ["--proc", "/proc", "--dev", "/dev"]
    if given.workdir:
        for inside, outside in (("/tmp", "tmp"), ("/var/tmp", "var_tmp")):
            (session / outside).mkdir(parents=True, exist_ok=True)
            (session / outside).chmod(0o1777)
            command += ["--bind", str(session / outside), inside] if inside == "/tmp" else []
    for bind in given.bind:
        source, target, *mode = bind.split(":")
        if not Path(source).exists():
            _fail(f"container creation failed: mount {source}->{target} error: no such file")
        command += ["--bind" if mode == ["rw"] else "--ro-bind", source, target]
    command += ["--info-fd", str(info)] if info is not None else []
    return [*command, "--", "/bin/sh", "-c", "exec sleep infinity"]


def _in_mounts(given: argparse.Namespace, command: list[str]) -> list[str]:
    """Mount the overlay in a mount namespace of its own, which ends with the instance."""
    if not given.overlay:
        return command
    over = Path(given.overlay)
    for name in ("upper", "work", "merged"):
        (over / name).mkdir(parents=True, exist_ok=True)
    extra = ",userxattr" if given.userns else ""
    options = f"lowerdir={given.image},upperdir={over}/upper,workdir={over}/work{extra}"
    script = 'mount -t overlay -o "$1" overlay "$2" && shift 2 && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", options, f"{over}/merged", *command]


def _folder() -> Path:
    folder = Path(os.environ.get("APPTAINER_CONFIGDIR") or Path.home() / ".apptainer") / "instances"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read(name: str) -> dict[str, Any] | None:
    """A running instance."""
    try:
        record: dict[str, Any] = json.loads((_folder() / name).read_text())
        os.kill(record["pid"], 0)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return None
    return record


if __name__ == "__main__":
    main(sys.argv[1:])
