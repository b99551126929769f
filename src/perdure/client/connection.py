"""One way to connect to Temporal: the CLI's own variables and profiles, our data converter."""

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
    """Pydantic in and out; fields nobody set stay out of the history.

    One per process, shared: the SDK makes one for each workflow and several for each of its tasks,
    and every new one would learn the types from the beginning.
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
"""The `temporal` command's own default, and what `perdure up` listens on where it is free."""
EXIT_PAUSE_S = 0.2
DATA_CONVERTER = DataConverter(payload_converter_class=CompactConverter)


async def connect(address: str | None = None, *, runtime: Runtime | None = None) -> Client:
    """Connect to `address`, or to what TEMPORAL_ADDRESS / TEMPORAL_PROFILE / the TOML file name,
    or to the stack that runs in this home, or to localhost:7233.

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
            f" ({_said(error)})"
        ) from error


def _said(error: Exception) -> str:
    """What the system said, out of the SDK's nested words."""
    said = re.findall(r'message: "([^"]*)"', str(error))
    return str(said[-1] if said else error)[:200]


def _let_native_threads_end() -> None:
    """Without this one short script in four aborts at its end, its work done.

    A native thread of the SDK that still hands back an answer while Python tears down is fatal
    (temporalio/sdk-python#300), and there is nothing to wait for by name.
    """
    gc.collect()
    time.sleep(EXIT_PAUSE_S)
