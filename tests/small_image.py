"""A root folder of a few tens of MB from this host's own programs: an image where no registry is."""

import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PROGRAMS = (
    "bash", "sh", "cat", "ls", "cp", "mv", "rm", "mkdir", "touch", "sleep", "env", "printf", "head",
    "tail", "grep", "sed", "tr", "stat", "sha256sum", "flock", "setsid", "yes", "true", "false",
    "pwd", "ln", "id", "git", "timeout", "chmod", "chown", "find", "xargs", "tar", "gzip", "base64",
    "mktemp", "date", "dirname", "basename", "sort", "uniq", "wc", "cut", "nohup", "uname", "tty",
    "dd", "kill", "mknod", "nproc", "awk", "diff", "patch", "df", "du", "whoami", "readlink",
)  # fmt: skip
LEFT_OUT = ("test", "idlelib", "lib2to3", "ensurepip", "dist-packages", "site-packages", "pydoc_data",
            "turtledemo", "tkinter", "config-*", "distutils", "__phello__")  # fmt: skip
FOLDERS = ("dev", "etc", "home", "opt", "proc", "root", "run", "sys", "tmp", "usr/bin", "var")


@cache
def why_not() -> str:
    """Empty, or why this host's programs make no image."""
    if not Path("/usr/bin/python3").exists():
        return "no /usr/bin/python3 to make an image of"
    return ""


def write_root(root: Path) -> Path:
    """Bash, coreutils, git and Python under a merged /usr."""
    for name in FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    (root / "tmp").chmod(0o1777)
    programs = [
        Path(found) for name in PROGRAMS if (found := shutil.which(name, path="/usr/bin:/bin"))
    ]
    python = Path("/usr/bin/python3").resolve()
    library = Path(subprocess.check_output(
        [python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"], text=True
    ).strip())  # fmt: skip
    shutil.copytree(
        library, root / str(library).lstrip("/"), symlinks=False, ignore_dangling_symlinks=True,
        ignore=shutil.ignore_patterns(*LEFT_OUT),
    )  # fmt: skip
    extensions = list((library / "lib-dynload").glob("*.so"))
    for program in [*programs, python]:
        _copy(program, root)
    (root / "usr/bin/python3").unlink(missing_ok=True)
    (root / "usr/bin/python3").symlink_to(python.name)
    for path in _libraries([*programs, python, *extensions]):
        _copy(path, root)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000::/home/agent:/bin/bash\n"
    )
    (root / "etc/group").write_text("root:x:0:\nagent:x:1000:\n")
    return root


def write_archive(root: Path, archive: Path) -> Path:
    subprocess.run(["tar", "--owner=0", "--group=0", "-C", root, "-cf", archive, "."], check=True)
    return archive


def _libraries(programs: Iterable[Path]) -> set[Path]:
    said = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False)
    return {
        Path(word)
        for word in said.stdout.split()
        if word.startswith("/") and not word.endswith(":")
    }


def _copy(path: Path, root: Path) -> None:
    """To the same place in a root whose /bin and /lib are links into /usr."""
    parts = str(path).lstrip("/")
    target = root / (parts if parts.startswith("usr/") else f"usr/{parts}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(path, target)


if __name__ == "__main__":
    write_archive(write_root(Path(sys.argv[1])), Path(sys.argv[2]))
