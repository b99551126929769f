"""`python -m tests.cheats`: every cheat and control on the made rows, as a table.

Beside each number of won cheats stands what swebench says about the same logs, if `--pairs` is 0.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from tests.cheats.cheat_catalog import CHEATS, CONTROLS, WEAK
from tests.cheats.cheat_suite import Bench, Result, cases, shown, table
from tests.cheats.made_rows import made_rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cheats", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name or family holds these words")
    parser.add_argument("--pairs", type=int, default=1, help="0: the official verdict, no twins")
    parser.add_argument("--most", type=int, default=2, help="gradings at a time")
    parser.add_argument("--json", type=Path, help="write every result to this file")
    chosen = parser.parse_args()
    results = asyncio.run(_run(chosen.only, chosen.pairs, chosen.most))
    print(table(results))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([shown(result) for result in results], indent=1))


async def _run(only: str, pairs: int, most: int) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        provider = BubblewrapProvider(Settings(home=Path(folder) / "home"))
        bench = Bench(provider, Path(folder) / "trees", pairs=pairs, most=most, tell=_tell)
        everything = cases(made_rows(), (*CHEATS, *WEAK), CONTROLS)
        return await bench.run([c for c in everything if only in c.name or only in c.family])


def _tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
