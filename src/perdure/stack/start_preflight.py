"""Checks, before any part of a stack starts, for problems that would make its start fail.

Each check is cheap and raises the error that the part itself would raise minutes later.
"""

import asyncio
from collections.abc import Callable

from perdure import retry
from perdure.client.temporal_server import configured_address
from perdure.errors import ConfigurationError, StoreUnavailable
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_ports
from perdure.storage.store_preflight import check_store

TEMPORAL_S = 10.0
"""Seconds to wait for the user's own server, which may have been started a moment ago."""
PAUSE_S = 0.2


def check(settings: Settings, engine: str, tell: Callable[[str], None]) -> None:
    """`engine`: the value of --engine. A store that does not answer but has worked before is a warning.

    Raises: ConfigurationError, MissingDependency.
    """
    from perdure.engines.configured_engine import check_engine_settings
    from perdure.gateway.rendering.tokenizer_setting import folder_of

    asked = {} if engine.startswith("scripted:") or not engine else {"url": engine}
    check_engine_settings(settings.changed(engine=asked))
    folder = folder_of(settings.engine.tokenizer)
    if folder is not None or settings.engine.tool_call_parser != "auto":
        from perdure.gateway.rendering.message_format import load_format

        load_format(settings.engine.tokenizer, settings.engine.tool_call_parser)
    stack_ports.check_host(settings.gateway.host)
    try:
        asyncio.run(check_store(settings))
    except StoreUnavailable as error:
        tell(f"warning: rollouts wait for the store: {error}")
    if configured_address(settings) is not None:
        asyncio.run(_temporal_answers(settings))


async def _temporal_answers(settings: Settings) -> None:
    """Raises: ConfigurationError."""
    from perdure.client.temporal_client import connect
    from perdure.telemetry import temporal_runtime

    # We use a separate runtime: the code that connects for good sets the process's default.
    runtime = temporal_runtime(settings.changed(metrics={"port": 0}))
    await retry.retry_call(
        lambda: connect(settings=settings, runtime=runtime),
        ConfigurationError,
        pauses=(PAUSE_S, PAUSE_S),
        patience_s=TEMPORAL_S,
    )
