"""What would stop a stack, looked at before any part of it starts.

Each look is cheap and raises what the part itself would say, minutes earlier.
"""

import asyncio
import os

from perdure.settings import Settings
from perdure.storage.base import open_store


def check(settings: Settings, engine: str) -> None:
    """`engine`: what `--engine` gave. Raises: ConfigurationError, MissingDependency, StoreUnavailable."""
    from perdure.gateway.engines.choose import check_engine_settings
    from perdure.gateway.tokenizer_folder import folder_of

    asked = {} if engine.startswith("scripted:") or not engine else {"engine_url": engine}
    check_engine_settings(settings.model_copy(update=asked))
    folder_of(settings.tokenizer)
    asyncio.run(write_and_remove(settings))


async def write_and_remove(settings: Settings) -> None:
    """A conditional write, read back and removed: what every step of a rollout does.

    Raises: ConfigurationError, MissingDependency, StoreUnavailable.
    """
    store = open_store(settings)
    key = f"doctor/{os.getpid()}"
    await store.put_if_absent(key, b"doctor")
    await store.get(key)
    await store.delete(key)
