"""A training loop in a process of its own, which a test kills. It prints the groups of each batch.

python -m tests.workflows.batch_loop POLICY_VERSION
"""

import asyncio
import sys
from collections.abc import Iterator

from perdure.client.sdk import Perdure
from perdure.types import GroupRequest, RolloutRequest

GROUPS = 4


def requests(version: int, run_id: str = "loop") -> Iterator[GroupRequest]:
    for k in range(GROUPS):
        rollout = RolloutRequest(
            run_id=run_id,
            instance=f"toy/add-{k}",
            agent="nop",
            policy_version=version,
            max_staleness=1,
        )
        yield GroupRequest(rollout=rollout, n_samples=2)


async def main(version: int) -> None:
    perdure = await Perdure.connect()
    async for batch in perdure.batches(requests(version), groups_per_batch=1, in_flight=GROUPS):
        print(*batch.group_ids, flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
