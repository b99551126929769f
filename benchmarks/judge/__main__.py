"""`python -m benchmarks.judge`: how often a reader tells hidden tests from their twins.

A judge sees a line of a test once as the original and once as a twin, and knows the rules of twins.
It wins if it recognizes both; a coin wins 0.25. `rules` is calibration's own judge; `learned` has
learned from other packages, from twins of the same strength. Calibration prefers strong twins. No
test runs: calibration would refuse some. The first run downloads 53 source distributions.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.judge.judges import by_rules, out_of_sample, win_rate, wins
from benchmarks.judge.twin_pools import TwinCase, pair_cases, release_pairs, row_cases

Found = dict[str, list[tuple[bool, bool]]]
"""Row -> for each of its twins, whether `rules` and `learned` win."""


def judged(cases: Sequence[TwinCase]) -> Found:
    learned, found = out_of_sample(cases), Found()
    for one in cases:
        won = wins(by_rules, one), wins(learned[one.row], one)
        found.setdefault(one.row, []).append(won)
    return found


def table(everything: Found, strong: Found) -> str:
    heads = "row | twins | rules | learned | strong twins | rules | learned"
    lines = [f"| {heads} |", "|---" * 7 + "|"]
    for row, won in everything.items():
        lines.append(f"| {row} | {_cells(won)} | {_cells(strong.get(row, []))} |")
    totals = (_cells([w for won in found.values() for w in won]) for found in (everything, strong))
    return "\n".join([*lines, f"| all | {' | '.join(totals)} |"])


def _cells(won: list[tuple[bool, bool]]) -> str:
    if not won:
        return "0 | |"
    rates = [win_rate(judge) for judge in zip(*won, strict=True)]
    return " | ".join([str(len(won)), *(f"{m:.2f} ({a:.2f} to {b:.2f})" for m, a, b in rates)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=20, help="twins of a row, strong and weak each")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="also SWE-bench rows with sdists")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write each win")
    options = parser.parse_args()
    cases = [one for pair in release_pairs() for one in pair_cases(pair, options.most)]
    for line in options.rows.read_bytes().splitlines() if options.rows else ():
        cases += row_cases(line, options.most)
    found = {"all": judged(cases), "strong": judged([one for one in cases if one.strong])}
    print(table(found["all"], found["strong"]))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
