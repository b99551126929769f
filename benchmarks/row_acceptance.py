"""`python -m benchmarks.row_acceptance FILE...`: counts the accepted rows of each file, by row format.

A row is accepted if its reader makes an instance of it and its grader finds everything that it needs.
Nothing is run: this table shows which rows are read, and calibration proves them.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from perdure import variant_registry
from perdure.errors import InstanceError
from perdure.graders.base import Grader
from perdure.instances.rows.format_recognition import recognised
from perdure.instances.rows.row_conversion import to_instance
from perdure.instances.rows.row_fields import Row
from perdure.instances.rows.row_readers import NumberedRow, read_rows


class Line(NamedTuple):
    """One line of the table."""

    file: str
    format: str
    rows: int
    accepted: int
    refusal: str
    """The first refusal; empty if every row was accepted."""


def lines_of(path: Path) -> Iterator[Line]:
    """One line per format in a file."""
    rows: Counter[str] = Counter()
    refused: dict[str, list[str]] = defaultdict(list)
    for row in read_rows(path):
        name = _format_of(row)
        rows[name] += 1
        if problem := row.problem or _problem(row):
            refused[name].append(problem)
    for name, count in rows.items():
        bad = refused[name]
        yield Line(path.name, name, count, count - len(bad), bad[0] if bad else "")


def _format_of(row: NumberedRow) -> str:
    try:
        return str(row.fields.get("data_source") or recognised(Row(row.number, row.fields)))
    except InstanceError:
        return "unknown"


def _problem(row: NumberedRow) -> str:
    try:
        instance = to_instance(row.fields, "rows", row.number)
        grader: Grader = variant_registry.load(
            "grader", variant_registry.GRADERS, instance.grading.protocol
        )()
        grader.validate(instance)
    except InstanceError as error:
        return str(error)
    return ""


def table(paths: Sequence[Path]) -> str:
    head = "| file | format | rows | accepted | first refusal |\n|---|---|---|---|---|\n"
    found = [line for path in paths for line in lines_of(path)]
    return head + "\n".join("| " + " | ".join(map(str, line)) + " |" for line in found)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.row_acceptance", description=__doc__
    )
    parser.add_argument("files", nargs="+", type=Path, help=".jsonl, .json or .parquet")
    print(table(parser.parse_args(arguments).files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
