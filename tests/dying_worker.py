"""`python -m tests.dying_worker WHEN PATTERN`: a worker that kills itself at one write to the store.

WHEN is `before` or `after`, PATTERN a glob of the key. SIGKILL `after` a checkpoint is the lost
answer: the work is done, and Temporal is never told. The product has no hook for this; the store's
own methods are wrapped here, in the test's process.
"""

import fnmatch
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from perdure.storage.local_store import LocalStore
from workers.worker_process import main

Write = Callable[..., Awaitable[Any]]


def dying(write: Write, when: str, pattern: str) -> Write:
    async def wrapped(store: LocalStore, key: str, data: bytes, **options: Any) -> Any:
        mortal = fnmatch.fnmatch(key, pattern)
        if mortal and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = await write(store, key, data, **options)
        if mortal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return wrapped


if __name__ == "__main__":
    moment = sys.argv[1:]
    del sys.argv[1:]  # the worker reads its own
    for name in ("put", "put_if_absent"):
        setattr(LocalStore, name, dying(getattr(LocalStore, name), *moment))
    main()
