"""Options that several benchmarks share."""

import argparse
from pathlib import Path


def words(text: str) -> tuple[str, ...]:
    """`a,b`; `-` for none."""
    return tuple(part for part in text.split(",") if part not in ("", "-"))


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all counts to this file"
    )
    parser.add_argument("--keep", action="store_true", help="keep the working folder")
