"""Removes what `.dockerignore` names from a copy of a build context, for builders that do not read it."""

import re
import shutil
from pathlib import Path

from perdure.sandboxes.image_builds import DOCKERFILE

IGNORE_FILE = ".dockerignore"


def remove_ignored(context: Path) -> None:
    """The last pattern that matches decides; `!` keeps. The Dockerfile stays."""
    try:
        lines = (context / IGNORE_FILE).read_text().splitlines()
    except FileNotFoundError:
        return
    rules = [_rule(line.strip()) for line in lines if line.strip() and line[0] != "#"]
    for path in sorted(context.rglob("*"), reverse=True):  # the content of a folder first
        name = path.relative_to(context).as_posix()
        ignored = [keeps for pattern, keeps in rules if pattern.match(name)]
        if not ignored or ignored[-1] or name in (DOCKERFILE, IGNORE_FILE):
            continue
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        elif not any(path.iterdir()):
            shutil.rmtree(path)


def _rule(line: str) -> tuple[re.Pattern[str], bool]:
    """A pattern for the paths and all below them, and whether the line keeps them (`!`)."""
    keeps, words = line.startswith("!"), line.removeprefix("!").strip().strip("/")
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]*\])", words.removeprefix("./"))
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    text = "".join(
        known.get(one) or (one if one.startswith("[") else re.escape(one)) for one in parts
    )
    return re.compile(rf"{text}(?:/.*)?\Z"), keeps
