"""Synthetic rows that share one module, and correct fixes of it, from the listings in `boxes/`.

- `module.txt`: the code under test. A line begins with a space, `-` (only in the base) or `+` (only in
  gold).
- `contexts.txt`: the hidden tests of each row. Each test has its expectation in another
context, such as a loop, a handler, a fixture or an expected exception.
- `fixes.txt`: correct fixes that differ from gold, each as hunks of an edit of gold.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from perdure.testing.grader_contract import Edits, diff_of
from perdure.types import Grading, Instance, Source, SourceKind

FOLDER = Path(__file__).parent / "boxes"
MODULE = "boxes.py"
GOLD_ONLY = "gold itself"


@dataclass(frozen=True)
class Fix:
    """A correct fix, as a diff of the base."""

    name: str
    patch: bytes


def base() -> Edits:
    return {MODULE: _version(_module(), " -")}


def rows() -> Iterator[Instance]:
    """Without test lists, which calibration computes."""
    gold = diff_of({MODULE: _version(_module(), " +")}, base())
    for name, tests in _sections("contexts"):
        path = f"tests/test_{name}.py"
        yield Instance(
            instance_id=name,
            dataset="made-fixes",
            problem_statement="Boxes do not do what they should.",
            source=Source(kind=SourceKind.DIRECTORY),
            grading=Grading(
                test_patch=diff_of({path: tests}, base()),
                test_cmd=f"python -m pytest -rA {path}",
            ),
            gold_patch=gold,
        )


def fixes() -> Iterator[Fix]:
    """Gold comes first."""
    for name, text in fixed_modules().items():
        yield Fix(name, diff_of({MODULE: text}, base()))


def fixed_modules() -> dict[str, str]:
    """The module of each fix. Raises: ValueError if an edit does not fit gold."""
    gold = _version(_module(), " +")
    others = {name: edited(gold, name, edit) for name, edit in _sections("fixes")}
    return {GOLD_ONLY: gold, **others}


def edited(gold: str, name: str, edit: str) -> str:
    """Raises: ValueError if a hunk does not fit."""
    for hunk in edit.split("@@\n"):
        old, new = (_version(hunk, signs) for signs in (" -", " +"))
        if gold.count(old) != 1:
            raise ValueError(f"{name}: gold has {gold.count(old)} times:\n{old}")
        gold = gold.replace(old, new)
    return gold


def _module() -> str:
    return (FOLDER / "module.txt").read_text()


def _sections(listing: str) -> Iterator[tuple[str, str]]:
    for text in (FOLDER / f"{listing}.txt").read_text().removeprefix("=== ").split("\n=== "):
        title, _, section = text.partition("\n")
        yield title, section.rstrip("\n") + "\n"


def _version(listing: str, signs: str) -> str:
    return "".join(f"{line[1:]}\n" for line in listing.splitlines() if (line or " ")[0] in signs)
