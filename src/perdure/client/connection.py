"""Connects to Temporal: to the user's server or to this home's stack, with our data converter."""

import atexit
import gc
import re
import time
from dataclasses import replace
from datetime import timedelta
from typing import ClassVar, Self, cast

from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client, Interceptor
from temporalio.contrib.pydantic import PydanticPayloadConverter, ToJsonOptions
from temporalio.converter import DataConverter, DefaultFailureConverterWithEncodedAttributes
from temporalio.runtime import Runtime
from temporalio.service import RPCError, RPCStatusCode

from perdure import retry, tracing
from perdure.client import local_stack
from perdure.client.server import Server, dev_server, given_address, given_server
from perdure.errors import ConfigurationError
from perdure.settings import environment
from perdure.settings.load import load_settings
from perdure.settings.tree import Settings


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
NAMESPACE_PATIENCE_S, NAMESPACE_PAUSE_S = 3.0, 0.5
"""A busy dev server does not know its namespace for a moment after the namespace was changed."""
ASK_LIMIT = timedelta(seconds=2)
EXIT_PAUSE_S = 0.2
DATA_CONVERTER = DataConverter(payload_converter_class=CompactConverter)
"""Without encryption."""


def data_converter(settings: Settings) -> DataConverter:
    """Ours, encrypting if the settings name keys; then messages and traces of failures are encrypted too.

    Raises: ConfigurationError, MissingDependency.
    """
    file = settings.temporal.codec_keys_file
    if file is None:
        return DATA_CONVERTER
    from perdure.client.encryption import EncryptingCodec, Keys

    return replace(
        DATA_CONVERTER,
        payload_codec=EncryptingCodec(Keys(file.absolute())),
        failure_converter_class=DefaultFailureConverterWithEncodedAttributes,
    )


async def connect(
    address: str | None = None,
    *,
    settings: Settings | None = None,
    runtime: Runtime | None = None,
) -> Client:
    """Connect to `address`, else to what `settings`, TEMPORAL_ADDRESS, TEMPORAL_PROFILE or Temporal's
    TOML file name, else to the stack that runs in this home, else to localhost:7233.

    `settings`: by default this process's. Raises: ConfigurationError when nothing answers there, or
    the settings are wrong.
    """
    settings = settings or load_settings()
    if address or given_address(settings):
        return await connect_to(given_server(settings, address or ""), settings, runtime)
    here = local_stack.address(settings)
    if here is None and environment.variables().get("TEMPORAL_ADDRESS") == "":
        raise ConfigurationError(
            f"TEMPORAL_ADDRESS is empty and nothing runs in {settings.home}, the home: set it to a "
            f"server's address, or unset it for {DEFAULT_ADDRESS}"
        )
    return await connect_to(dev_server(settings, here or DEFAULT_ADDRESS), settings, runtime)


async def connect_to(server: Server, settings: Settings, runtime: Runtime | None = None) -> Client:
    """Raises: ConfigurationError when nothing answers there."""
    atexit.unregister(_let_native_threads_end)
    atexit.register(_let_native_threads_end)
    try:
        return await Client.connect(
            **server.arguments(),
            data_converter=data_converter(settings),
            runtime=runtime,
            interceptors=_interceptors(settings),
        )
    except (RuntimeError, RPCError, ValueError) as error:
        raise ConfigurationError(
            f"no Temporal server answers at {server.address}: run `perdure up`, or set TEMPORAL_ADDRESS"
            f" ({_reason(error)})"
        ) from error


async def check_namespace(client: Client) -> None:
    """Raises: ConfigurationError if the server has no such namespace.

    A server that does not tell, such as one with narrow API keys, is believed.
    """
    asked = DescribeNamespaceRequest(namespace=client.namespace)
    try:
        await retry.again(
            lambda: client.workflow_service.describe_namespace(asked, timeout=ASK_LIMIT),
            RPCError,
            pauses=(NAMESPACE_PAUSE_S, NAMESPACE_PAUSE_S),
            patience_s=NAMESPACE_PATIENCE_S,
            passes=lambda error: error.status is RPCStatusCode.NOT_FOUND,
        )
    except RPCError as error:
        if error.status is RPCStatusCode.NOT_FOUND:
            raise ConfigurationError(
                f"the Temporal server at {client.service_client.config.target_host} has no namespace"
                f" {client.namespace!r}: set TEMPORAL_NAMESPACE or PERDURE_TEMPORAL__NAMESPACE to"
                " one that `temporal operator namespace list` shows"
            ) from error


def _interceptors(settings: Settings) -> list[Interceptor]:
    """None without traces, and none in a trainer's process that lacks OpenTelemetry."""
    if not tracing.wanted(settings) or not tracing.importable():
        return []
    from perdure.client.traced import interceptors

    return interceptors()


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
