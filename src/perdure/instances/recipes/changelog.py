"""Finds the changelogs of a released package, and the entry of one version. It reads only the
headings of reStructuredText and Markdown.
"""

import re
from pathlib import Path, PurePosixPath

NAME = re.compile(r"^(change[-_]?(s|log)|history|news|release[-_]?notes|versions)$", re.IGNORECASE)
SUFFIXES = {"", ".md", ".rst", ".txt"}
PLACES = ("", "docs", "doc", "docs/source", "doc/source")
VERSION = r"\d+\.\d+[\w.]*"
UNDERLINE = re.compile(r"^([=\-~^\"'`#*+])\1{2,}\s*$")


def is_changelog(path: str) -> bool:
    pure = PurePosixPath(path)
    return pure.suffix.lower() in SUFFIXES and NAME.match(pure.stem) is not None


def entry(tree: Path, version: str) -> str:
    """The entry of a version in the tree's changelogs; empty if none has one."""
    for file in _files(tree):
        found = section(file.read_text("utf-8", "replace"), version)
        if found:
            return found
    return ""


def section(text: str, version: str) -> str:
    """The text from the version's heading to the next version's."""
    lines = text.splitlines()
    headings = [index for index in range(len(lines)) if _is_version_heading(lines, index)]
    for position, start in enumerate(headings):
        if _names(_heading(lines[start]), version):
            end = headings[position + 1] if position + 1 < len(headings) else len(lines)
            return _trimmed(lines[start + 1 : end])
    return ""


def _files(tree: Path) -> list[Path]:
    """Changelogs, nearest first, then the package's description, which may end with one."""
    folders = [tree / place for place in PLACES]
    found = [
        file
        for folder in folders
        if folder.is_dir()
        for file in sorted(folder.iterdir())
        if file.is_file() and is_changelog(file.name)
    ]
    return [*found, *(file for file in [tree / "PKG-INFO"] if file.is_file())]


def _is_version_heading(lines: list[str], index: int) -> bool:
    line = lines[index]
    if line.startswith((" ", "\t")) or not re.search(VERSION, _heading(line)):
        return False
    if re.match(r"#{1,4}\s", line):
        return True
    below = lines[index + 1] if index + 1 < len(lines) else ""
    return bool(UNDERLINE.match(below)) or bool(
        re.match(rf"^(Version|Release)\s+v?{VERSION}\b", line)
    )


def _heading(line: str) -> str:
    """Remove link targets: `Unreleased <.../compare/2.10.1...HEAD>`__ names no version."""
    return re.sub(r"<[^>]*>|\([^)]*\)", "", line)


def _names(heading: str, version: str) -> bool:
    return re.search(rf"(?<![\w.]){'v?' + re.escape(version)}(?![\w]|\.\d)", heading) is not None


def _trimmed(lines: list[str]) -> str:
    """Remove the heading's underline and the next heading's overline."""
    kept = list(lines)
    while kept and (not kept[0].strip() or UNDERLINE.match(kept[0])):
        kept.pop(0)
    while kept and (not kept[-1].strip() or UNDERLINE.match(kept[-1])):
        kept.pop()
    return "\n".join(line.rstrip() for line in kept)
