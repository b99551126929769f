"""A root folder of some tens of MB from this host's programs: an image without a registry."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PROGRAMS = (
    "bash", "sh", "cat", "ls", "cp", "mv", "rm", "mkdir", "touch", "sleep", "env", "printf", "head",
    "tail", "grep", "sed", "tr", "stat", "sha256sum", "flock", "setsid", "yes", "true", "false",
    "pwd", "ln", "id", "git", "timeout", "chmod", "chown", "find", "xargs", "tar", "gzip", "base64",
    "mktemp", "date", "dirname", "basename", "sort", "uniq", "wc", "cut", "nohup", "uname", "tty",
    "dd", "kill", "seq", "mknod", "nproc", "awk", "diff", "patch", "df", "du", "whoami", "readlink",
)  # fmt: skip
WHEELS_NEED = (
    "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libresolv.so.2",
    "librt.so.1", "libstdc++.so.6", "libutil.so.1",
)  # fmt: skip
LEFT_OUT = ("test", "idlelib", "lib2to3", "ensurepip", "dist-packages", "site-packages", "pydoc_data",
            "turtledemo", "tkinter", "config-*", "distutils", "__phello__", "lib-dynload", "__pycache__")  # fmt: skip
FOLDERS = ("dev", "etc", "home", "opt", "proc", "root", "run", "sys", "tmp", "usr/bin", "var")


@cache
def why_not() -> str:
    """Empty, or why this host's programs cannot make an image."""
    if not Path("/usr/bin/python3").exists():
        return "no /usr/bin/python3 to make an image of"
    return ""


def write_programs(root: Path, names: Iterable[str]) -> list[Path]:
    """Programs of this host with their libraries, under a merged /usr. Returns their paths."""
    for name in FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    (root / "tmp").chmod(0o1777)
    found = (shutil.which(name, path="/usr/bin:/bin") for name in names)
    programs = [Path(path) for path in found if path]
    for path in [*programs, *_libraries(programs)]:
        _copy(path, root)
    return programs


def write_root(root: Path) -> Path:
    """Bash, coreutils, git and Python under a merged /usr."""
    write_programs(root, PROGRAMS)
    python = Path("/usr/bin/python3").resolve()
    library = Path(subprocess.check_output(
        [python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"], text=True
    ).strip())  # fmt: skip
    _write_library(python, library, root)
    extensions = list((library / "lib-dynload").glob("*.so"))
    _copy(python, root)
    (root / "usr/bin/python3").unlink(missing_ok=True)
    (root / "usr/bin/python3").symlink_to(python.name)
    for path in _libraries([python, *extensions]) | _wheels_need():
        _copy(path, root)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000::/home/agent:/bin/bash\n"
    )
    (root / "etc/group").write_text("root:x:0:\nagent:x:1000:\n")
    return root


def _write_library(python: Path, library: Path, root: Path) -> None:
    """The standard library, compiled, in one zip: engines without overlays copy each file."""
    target = root / str(library).lstrip("/")
    (target / "lib-dynload").mkdir(parents=True)
    shutil.copy(library / "os.py", target)  # by which Python finds its library
    for extension in (library / "lib-dynload").glob("*.so"):
        shutil.copy(extension, target / "lib-dynload")
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder, "library")
        shutil.copytree(
            library,
            compiled,
            ignore_dangling_symlinks=True,
            ignore=shutil.ignore_patterns(*LEFT_OUT),
        )
        subprocess.run([python, "-I", "-m", "compileall", "-b", "-q", compiled], check=False)
        name = f"python{library.name.removeprefix('python').replace('.', '')}.zip"
        with zipfile.ZipFile(target.parent / name, "w") as archive:
            for path in compiled.rglob("*.pyc"):
                archive.write(path, path.relative_to(compiled))


def write_archive(root: Path, archive: Path) -> Path:
    subprocess.run(["tar", "--owner=0", "--group=0", "-C", root, "-cf", archive, "."], check=True)
    return archive


def _wheels_need() -> set[Path]:
    """Libraries that compiled wheels expect on every Linux."""
    listed = subprocess.check_output(["/sbin/ldconfig", "-p"], text=True).splitlines()
    paths = (line.rpartition(" => ")[2] for line in listed)
    return {Path(path) for path in paths if Path(path).name in WHEELS_NEED}


def _libraries(programs: Iterable[Path]) -> set[Path]:
    said = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, check=False)
    return {
        Path(word)
        for word in said.stdout.split()
        if word.startswith("/") and not word.endswith(":")
    }


def _copy(path: Path, root: Path) -> None:
    """The same path in a root whose /bin and /lib are links into /usr."""
    parts = str(path).lstrip("/")
    target = root / (parts if parts.startswith("usr/") else f"usr/{parts}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(path, target)


if __name__ == "__main__":
    write_archive(write_root(Path(sys.argv[1])), Path(sys.argv[2]))
