"""Connects to Temporal with the `temporal` CLI's variables and profiles, and our data converter."""

import atexit
import gc
import re
import time
from typing import ClassVar, Self, cast

from temporalio.client import Client
from temporalio.contrib.pydantic import PydanticPayloadConverter, ToJsonOptions
from temporalio.converter import DataConverter
from temporalio.envconfig import ClientConfig
from temporalio.runtime import Runtime
from temporalio.service import RPCError

from perdure.client import local_stack
from perdure.errors import ConfigurationError


class CompactConverter(PydanticPayloadConverter):
    """Pydantic in and out; fields that were not set stay out of the history.

    One instance per process: the SDK makes one for each workflow and several for each of its tasks,
    and every new one would build its type adapters again.
    """

    _shared: ClassVar["CompactConverter | None"] = None

    def __new__(cls) -> Self:
        if cls._shared is None:
            cls._shared = super().__new__(cls)
        return cast(Self, cls._shared)

    def __init__(self) -> None:
        if not hasattr(self, "converters"):
            super().__init__(ToJsonOptions(exclude_unset=True))


DEFAULT_ADDRESS = "localhost:7233"
"""The `temporal` command's default, and what `perdure up` listens on if it is free."""
EXIT_PAUSE_S = 0.2
DATA_CONVERTER = DataConverter(payload_converter_class=CompactConverter)


async def connect(address: str | None = None, *, runtime: Runtime | None = None) -> Client:
    """Connect to `address`, else to what TEMPORAL_ADDRESS, TEMPORAL_PROFILE or the TOML file names,
    else to the stack that runs in this home, else to localhost:7233.

    Raises: ConfigurationError when nothing answers there, or the settings are wrong.
    """
    config = ClientConfig.load_client_connect_config()
    given = address or config.get("target_host")
    target = given or local_stack.address() or DEFAULT_ADDRESS
    config["target_host"] = target
    atexit.unregister(_let_native_threads_end)
    atexit.register(_let_native_threads_end)
    try:
        return await Client.connect(**config, data_converter=DATA_CONVERTER, runtime=runtime)
    except (RuntimeError, RPCError) as error:
        raise ConfigurationError(
            f"no Temporal server answers at {target}: run `perdure up`, or set TEMPORAL_ADDRESS"
            f" ({_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    """The innermost message of the SDK's nested ones."""
    found = re.findall(r'message: "([^"]*)"', str(error))
    return str(found[-1] if found else error)[:200]


def _let_native_threads_end() -> None:
    """Wait a moment at exit: without this, one short script in four aborts after its work is done.

    The process dies if a native thread of the SDK returns an answer while Python tears down
    (temporalio/sdk-python#300), and the SDK offers nothing to wait for.
    """
    gc.collect()
    time.sleep(EXIT_PAUSE_S)
