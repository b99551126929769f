"""Turns a published test script into the command that Perdure runs once the diff and the hidden
tests are in place. It drops the script's resets, patches and reports, which the grader does itself.
"""

import re
from collections.abc import Iterator
from itertools import chain

START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"

OFFLINE = "export PIP_NO_INDEX=1"
"""Makes pip fail at once instead of waiting. Published scripts reinstall the tree before its tests,
but the grading sandbox reaches no package index; the image's installation stays."""

ENTERS = re.compile(r"(cd|source|conda activate|set) ")
"""Matches lines that enter the folder and the environment and run nothing else."""

_INSTALLS = re.compile(r"\bpip3? install\b")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_GRADERS_OWN = re.compile(
    r"""\s*(
        \#!.* | git\ config\ --global\ --add\ safe\.directory\ .* | git\ status | git\ show
        | git\ -c\ core\.fileMode=false\ diff\ .* | git\ checkout\ [0-9a-f]{40}\ .* | git\ checkout\ HEAD\ .*
        | git\ apply\ .* | echo\ "No\ test\ files\ to\ reset" | :\ '>>>>>.*
        | SWEBENCH_TEST_EXIT_CODE=\$\? | echo\ .*Test\ Exit\ Code.*
    )\s*""",
    re.VERBOSE,
)


def marked(script: str) -> tuple[str, str] | None:
    """The lines before the start marker, and between the markers; None without markers."""
    place = re.search(f"^: '{START}'\n(.*?)^: '{END}'", script, re.DOTALL | re.MULTILINE)
    return (script[: place.start()], place[1]) if place else None


def command(before: str, tests: str) -> str:
    """The lines of both scripts that the grader does not replace."""
    lines = list(_without_repeats(chain(_kept(before), _kept(tests))))
    if any(_INSTALLS.search(line) for line in lines):
        lines.insert(1 if lines[0].startswith("set ") else 0, OFFLINE)
    return "\n".join(lines)


def _kept(script: str) -> Iterator[str]:
    """The lines that the grader does not replace, with their here-documents."""
    patched = set(re.findall(r"^\+\+\+ b/(.*)$", script, re.MULTILINE))
    lines = iter(script.splitlines())
    for line in lines:
        own = bool(_GRADERS_OWN.fullmatch(line)) or _removes(line, patched)
        if line.strip() and not own:
            yield line
        if found := _HEREDOC.search(line):
            for fed in lines:
                if not own:
                    yield fed
                if fed.strip() == found[2]:
                    break


def _removes(line: str, patched: set[str]) -> bool:
    """The line removes files that the script's patch adds. It must be dropped, because here they
    are already in place."""
    return line.startswith("rm -f ") and set(line.split()[2:]) <= patched


def _without_repeats(lines: Iterator[str]) -> Iterator[str]:
    """Drop repeated lines that enter the folder or the environment."""
    seen: set[str] = set()
    for line in lines:
        if line not in seen or not ENTERS.match(line):
            yield line
        seen.add(line)
