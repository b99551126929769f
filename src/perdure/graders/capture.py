"""Takes the agent's change out of its sandbox as bytes.

It trusts nothing that the agent could write: not its `.git`, its configuration, its index. What cannot
be part of a diff is left out and recorded. If no diff can be formed, that is the agent's doing and a
verdict; only a sandbox that is gone is a failure. The caller kills the agent first, and stores the
bytes afterwards.
"""

import asyncio
import io
import os
import re
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from perdure.errors import InstanceError, SandboxLost
from perdure.graders.git_diff import FileDiff, MalformedDiff, count_files, parse
from perdure.sandboxes.base import ExecState, ExecStatus, Sandbox
from perdure.untrusted.reading import Unparsable, read

CAPTURED_BYTES = 10 << 20
"""Largest diff that `capture` keeps, unless the settings give another number."""
MAX_FILES = 2000
BASE_GIT = "/opt/perdure/base.git"
"""Where a local sandbox should see the pristine git directory of its base, read-only: with
`Mount(tree / ".git", BASE_GIT)` in its spec, `capture(sandbox, BASE_GIT)` uploads nothing."""

_LIMIT_S = 300.0
_MOST_SAID = 100
"""Entries of `CapturedPatch.dropped`."""


@dataclass(frozen=True)
class CapturedPatch:
    """What the agent changed, exactly as git wrote it. `data` is empty when `too_large` or `refused`."""

    data: bytes
    files: int = 0
    ignored_files: int = 0
    """Files that .gitignore kept out; counted, not captured."""
    too_large: bool = False
    dropped: tuple[str, ...] = ()
    """What no diff can hold, as `reason: path`; at most 100 entries."""
    refused: str = ""
    """Why no diff could be formed."""

    def with_data(self, data: bytes) -> "CapturedPatch":
        """The same, with the bytes that an earlier writer already stored."""
        return replace(self, data=data)


async def prepare_capture(sandbox: Sandbox) -> str:
    """Copy `.git` aside before the agent starts, and return where: the `base_git` of `capture`.

    Only for sandboxes whose repository is not known on the host (it came with an image). The agent
    could still destroy the copy on purpose, but it would only lose its own change.
    Raises: InstanceError when the image has no git, or no repository at the workdir.
    """
    argv = ["bash", "-c", _PREPARE_SCRIPT, "prepare", f".perdure-base-{uuid4().hex}"]
    result = await sandbox.exec(argv, cwd=sandbox.workdir)
    if not result.status.ok:
        said = result.stderr[-300:].decode("utf-8", "replace").strip()
        raise InstanceError(
            f"`environment.workdir`: no git repository to copy at {sandbox.workdir}: {said}"
        )
    return os.fsdecode(result.stdout)


# Files in the sandbox's TMPDIR disappear with it, even if /tmp is the host's. The variable comes
# from the spec or the image, never from the agent. A folder inside the tree would be captured.
_TEMPORARY = """
temporary=${TMPDIR:-/tmp}
[ -w "$temporary" ] || chmod u+rwx "$temporary" 2>/dev/null
[[ $temporary = /* && $temporary/ != "$PWD"/* && -w $temporary ]] || temporary=/tmp
"""

_PREPARE_SCRIPT = (
    _TEMPORARY
    + r"""
git --version >/dev/null || exit
copy=$temporary/$1
mkdir "$copy" && cp -a .git/. "$copy" && printf %s "$copy"
"""
)


async def capture(
    sandbox: Sandbox,
    base_git: Path | str | None,
    *,
    max_bytes: int = CAPTURED_BYTES,
    max_files: int = MAX_FILES,
) -> CapturedPatch:
    """The difference between the base commit and the working tree.

    `base_git`: the pristine git directory of the base tree, as a `Path` on this host (uploaded
    now), or as a `str` inside the sandbox: a read-only mount (cheapest), or `prepare_capture`'s.
    None falls back to the objects and the HEAD of the sandbox's own repository: an agent that
    commits, or removes it, is then misread.
    Raises: SandboxLost when the sandbox is gone, or the host's own base cannot be read.
    """
    upload = await asyncio.to_thread(_pack, base_git) if isinstance(base_git, Path) else None
    where = "" if upload is not None else str(base_git or f"{sandbox.workdir}/.git")
    order = _Order(where, upload, max_bytes, max_files)
    first = ""
    for mode in ("plain", "repair"):
        taken = await _take(sandbox, order, mode)
        if taken.base_is_unreadable and (upload is not None or where == BASE_GIT):
            raise SandboxLost(
                f"the diff cannot be captured from {sandbox.identity}: {taken.problem}"
            )
        if not taken.problem:
            found = await _looked_at(taken, max_files, may_drop=mode == "repair")
            if isinstance(found, CapturedPatch):
                return found
            taken = replace(taken, problem=found)
        first = first or taken.problem
    return CapturedPatch(b"", refused=first[:500], dropped=taken.dropped)


async def _looked_at(taken: "_Taken", max_files: int, *, may_drop: bool) -> CapturedPatch | str:
    """The capture, or what is wrong with it."""
    files = taken.changed if taken.too_large else count_files(taken.data)
    if taken.too_large or files > max_files:
        return CapturedPatch(b"", files, taken.ignored_files, True, taken.dropped)
    try:
        data, count, gitlinks = await read(_without_gitlinks, taken.data)
    except Unparsable as error:
        return str(error)
    if isinstance(data, str) or (gitlinks and not may_drop):
        return data if isinstance(data, str) else "nested repository"
    dropped = (*taken.dropped, *(f"a repository: {path}" for path in gitlinks))
    return CapturedPatch(data, count, taken.ignored_files, dropped=dropped[:_MOST_SAID])


_GITLINK = b"160000"


def _without_gitlinks(diff: bytes) -> tuple[bytes | str, int, tuple[str, ...]]:
    """Runs among untrusted readers. A diff without them, or what is wrong with it; the number of its
    files; the paths of gitlinks, which no diff can carry."""
    try:
        files = parse(diff)
    except MalformedDiff as error:
        return str(error), 0, ()
    links = [file for file in files if _GITLINK in file.modes]
    if not links:
        return diff, len(files), ()
    kept = [file for file in files if _GITLINK not in file.modes]
    return b"".join(file.raw for file in kept), len(kept), tuple(map(_shown, links))


def _shown(file: FileDiff) -> str:
    return file.new_path[:300].decode("utf-8", "backslashreplace")


# One exec, a few short processes. A private git directory with our own configuration: hooks,
# filters, fsmonitor and textconv of the agent's are never looked up. Starting from the pristine
# index spares re-hashing: a file is only taken as unchanged while its ctime is, and ctime cannot
# be set. FIFOs go first, because git would wait for ever for a .gitignore that is one. `repair` is
# the second try: nested repositories move aside, attributes mean nothing, what git refuses is left
# out. Exit codes: 3 the base cannot be read, 4 too many files.
_SCRIPT = (
    r"""
tree=$1 base=$2 name=$3 mode=$4 aside=$5 max_bytes=$6 max_files=$7
cd "$tree" 2>/dev/null || { chmod u+rwx "$tree" && cd "$tree"; } || exit 5
"""
    + _TEMPORARY
    + r"""
own=$temporary/$name
unset "${!GIT_@}"
mkdir -p "$own/objects" "$own/info" "$own/refs" || exit 5
exec 9>&2 2>"$own/said"
ignored=0 changed=0
finish() {
  code=$?
  { head -c 2000 "$own/said"
    printf . 2>/dev/null >"$own/room" || printf '\nthe disk of the sandbox is full'
    printf '\n%s\n%d %d\0' "$name" "$ignored" "$changed"
    head -z -n 100 "$own/dropped"; } >&9
  rm -rf "$own"
  exit $code
}
trap finish EXIT
drop() { printf '%s: %s\0' "$1" "$2" >>"$own/dropped"; }
drop_all() { while IFS= read -r -d '' path; do drop "$1" "$path"; done < <(head -z -n 100); }

if [ -z "$base" ]; then base=$own/base; mkdir "$base"; tar -xf - -C "$base" || exit 5; fi
[ -r "$base/HEAD" ] && [ -d "$base/objects" ] || { echo "no repository at $base" >&2; exit 3; }
if [ "$mode" = repair ]; then
  # Ignored files are not captured, and may be what fills the disk.
  head -c "$max_bytes" /dev/zero >"$own/room" 2>/dev/null || git --git-dir="$base" \
    --work-tree=. -c core.fsmonitor=false -c core.excludesFile=/dev/null clean -ffdXq
  rm -f "$own/room"
fi
cp -r --preserve=timestamps "$base/HEAD" "$base/refs" "$base/packed-refs" "$base/info" \
  "$base/index" "$own/" 2>/dev/null
printf '\n%s\n' "$aside" >>"$own/info/exclude"
printf '%s\n' '[core]' 'repositoryformatversion = 0' 'bare = false' 'fileMode = true' \
  'symlinks = true' 'autocrlf = false' 'hooksPath = /dev/null' 'fsmonitor = false' \
  'untrackedCache = false' 'excludesFile = /dev/null' 'attributesFile = /dev/null' \
  'protectNTFS = false' 'protectHFS = false' 'preloadIndex = false' 'looseCompression = 0' \
  >"$own/config" || exit 5
export HOME=$own XDG_CONFIG_HOME=$own LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
export GIT_DIR=$own GIT_WORK_TREE=$PWD GIT_ALTERNATE_OBJECT_DIRECTORIES=$base/objects

outside=(. -path ./.git -prune -o)
if [ -n "$(find "${outside[@]}" \( -type d ! -perm -u=rwx -o -type f ! -perm -u=r \) \
    -print -quit 2>/dev/null)" ]; then
  chmod -R u+rwX . 2>/dev/null
fi
if [ "$mode" = repair ]; then
  printf '* !text !eol !ident !filter !working-tree-encoding !diff\n' >"$own/info/attributes"
  find "${outside[@]}" -iname .git -prune -exec bash -c \
    'for path; do to=${path%????}$0; rm -rf "$to" && mv -T "$path" "$to" || rm -rf "$path"; done' \
    "$aside" {} +
  keep_going=--ignore-errors
fi
control=(-name .gitignore -o -name .gitattributes)
find "${outside[@]}" -name "$aside" -prune -fprintf "$own/nested" '%P\0' -o \
  \( -type p -o -type s -o -type b -o -type c -o \
    \( "${control[@]}" \) \( -xtype p -o -xtype c \) \) \
  -fprintf "$own/special" '%P\0' -exec rm -f {} +
sed -zi 's/\.perdure-aside$//' "$own/nested"
drop_all 'a repository' <"$own/nested"
drop_all 'not a file' <"$own/special"
[ -f "$own/index" ] || git read-tree HEAD || exit 3

# Also refreshes the index by reading alone; `add` would store again whatever looks touched.
git status --porcelain -z --ignored -uall --no-renames >"$own/status" || exit 5
ignored=$(grep -zc '^!!' "$own/status")
changed=$(grep -zvc '^!!' "$own/status")

specs=(.)
while IFS= read -r -d '' path; do  # a file that alone exceeds the cap
  git --literal-pathspecs ls-files -om --exclude-standard -- "$path" | grep -q . || continue
  specs+=(":(exclude,literal)$path")
  drop 'too large' "$path"
done < <(find "${outside[@]}" -type f -size +"${max_bytes}c" -printf '%P\0' | head -z -n 100)

add() { git add --no-warn-embedded-repo ${keep_going-} "$@" >&2 || [ -n "${keep_going-}" ]; }
if [ "$changed" -le "$max_files" ]; then
  add -A -- "${specs[@]}" || exit 5
else  # untracked files of folders that tools make may go
  tracked=$(grep -zvc -e '^!!' -e '^??' "$own/status")
  generated=(.venv venv node_modules __pycache__ .tox .nox .eggs .mypy_cache .pytest_cache
    .ruff_cache .hypothesis build dist target)
  few=("${specs[@]}")
  for name_of in "${generated[@]}"; do few+=(":(exclude,glob)**/$name_of/**"); done
  while IFS= read -r -d '' path; do few+=(":(exclude,literal)$path")
  done < <(find "${outside[@]}" -name pyvenv.cfg -printf '%P\0' | head -z -n 20 |
    sed -z 's,/\?pyvenv.cfg$,,')
  left=$(git ls-files -oz --exclude-standard -- "${few[@]}" | tr -dc '\0' | wc -c)
  [ $((tracked + left)) -le "$max_files" ] || exit 4
  drop generated "$((changed - tracked - left)) untracked files, as in build or node_modules"
  add -u -- "${specs[@]}" || exit 5
  add -- "${few[@]}" || exit 5
fi
if [ -n "${keep_going-}" ]; then
  while IFS= read -r line; do drop 'refused by git' "${line:0:300}"
  done < <(grep -a '^error: ' "$own/said" | head -n 50)
fi
git diff-index --cached -p --binary --full-index --no-color --no-ext-diff --no-textconv \
  --no-renames --src-prefix=a/ --dst-prefix=b/ HEAD || exit 5
"""
)


@dataclass(frozen=True)
class _Order:
    base: str
    upload: bytes | None
    max_bytes: int
    max_files: int


@dataclass(frozen=True)
class _Taken:
    data: bytes = b""
    ignored_files: int = 0
    changed: int = 0
    """Files, as git's status tells."""
    too_large: bool = False
    dropped: tuple[str, ...] = ()
    problem: str = ""
    base_is_unreadable: bool = False


async def _take(sandbox: Sandbox, order: _Order, mode: str) -> _Taken:
    """Raises: SandboxLost."""
    name = f".perdure-capture-{uuid4().hex}"
    limits = (str(order.max_bytes), str(order.max_files))
    argv = ["bash", "-c", _SCRIPT, "capture", sandbox.workdir, order.base, name, mode, _ASIDE, *limits]  # fmt: skip
    # Not in the workdir: the agent may have closed it.
    await sandbox.start(name[1:], argv, cwd="/", stdin=order.upload or b"", timeout_s=_LIMIT_S)
    status = await sandbox.wait(name[1:])
    if status.state is ExecState.LOST or status.cause == "sandbox":
        raise SandboxLost(f"sandbox {sandbox.identity} died while its diff was captured")
    if status.state is ExecState.KILLED and status.cause == "output":
        return _Taken(too_large=True)
    data = await sandbox.output(name[1:], "stdout", limit=order.max_bytes + 1)
    record = _read_record(await sandbox.output(name[1:], "stderr"), name)
    taken = _Taken(
        data,
        record.ignored_files,
        record.changed,
        too_large=len(data) > order.max_bytes or status.code == _TOO_MANY,
        dropped=record.dropped,
        base_is_unreadable=status.code == _BASE_IS_UNREADABLE,
    )
    if status.ok or taken.too_large:
        return taken
    return replace(taken, problem=_why(status, record.said))


_ASIDE = ".git.perdure-aside"
_BASE_IS_UNREADABLE, _TOO_MANY = 3, 4
_LARGEST_RECORD = 1 << 20


@dataclass(frozen=True)
class _Record:
    """What the script says at its end, after what git said."""

    said: bytes
    ignored_files: int = 0
    changed: int = 0
    dropped: tuple[str, ...] = ()


def _read_record(stderr: bytes, name: str) -> _Record:
    """Never fails: in an image, the agent may have replaced git or bash."""
    said, mark, record = stderr.rpartition(f"\n{name}\n".encode())
    counts, _, entries = record[:_LARGEST_RECORD].partition(b"\0")
    if not mark or not (numbers := re.fullmatch(rb"(\d{1,9}) (\d{1,9})", counts)):
        return _Record(stderr)
    texts = (
        entry[:400].decode("utf-8", "backslashreplace")
        for entry in entries.split(b"\0")[:-1][:_MOST_SAID]
    )
    return _Record(said, int(numbers[1]), int(numbers[2]), tuple(texts))


def _why(status: ExecStatus, said: bytes) -> str:
    text = said[-500:].decode("utf-8", "replace").strip()
    if status.state is ExecState.KILLED:
        return f"the capture was ended by {status.cause} {status.signal or ''}: {text}"
    return text or str(status)


def _pack(git_dir: Path) -> bytes:
    """The parts of a git directory that tell the base commit, as an uncompressed tar."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for part in ("HEAD", "packed-refs", "refs", "info", "index", "objects"):
            if (git_dir / part).exists():
                tar.add(git_dir / part, arcname=part)
    return packed.getvalue()
