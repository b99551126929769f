"""The end of a large run, as a process: the worker sums up its episodes, the waiting client reads them.

python -m benchmarks.report.end_of_run worker STORE RUN      # or client
"""

import asyncio
import json
import sys
from pathlib import Path

from perdure.cli.runs import results
from perdure.rollouts.runs import finish_run
from perdure.storage.local import LocalStore
from perdure.types import RunRequest


async def _main(side: str, store: LocalStore, run_id: str) -> None:
    if side == "worker":
        await finish_run(store, RunRequest(run_id=run_id, instances=("made/any",)))
    else:
        episodes = await results.episodes(store, run_id)
        json.dump(results.document(run_id, episodes), sys.stdout)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], LocalStore(Path(sys.argv[2])), sys.argv[3]))
