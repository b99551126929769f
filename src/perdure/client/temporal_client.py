"""Connects to Temporal, the user's server or this home's stack, with Perdure's data converter."""

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
from perdure.client import local_stack_address
from perdure.client.temporal_server import Server, configured_address, configured_server, dev_server
from perdure.errors import ConfigurationError
from perdure.settings import process_environment
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings


class CompactConverter(PydanticPayloadConverter):
    """Converts pydantic models. Fields that were not set stay out of the history.

    There is one instance per process. The SDK creates one for each workflow and several for each of
    its tasks, and each new one would build its type adapters again.
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
"""The default of the `temporal` command and, if the port is free, of `perdure up`."""
NAMESPACE_PATIENCE_S, NAMESPACE_PAUSE_S = 3.0, 0.5
"""Seconds for which a busy dev server may not know its namespace after a change of the
namespace."""
ASK_LIMIT = timedelta(seconds=2)
EXIT_PAUSE_S = 0.2
DATA_CONVERTER = DataConverter(payload_converter_class=CompactConverter)
"""The data converter without encryption."""


def data_converter(settings: Settings) -> DataConverter:
    """The data converter. If the settings name keys, it encrypts payloads, failure messages and
    traces.

    Raises: ConfigurationError, MissingDependency.
    """
    file = settings.temporal.codec_keys_file
    if file is None:
        return DATA_CONVERTER
    from perdure.client.payload_encryption import EncryptingCodec, Keys

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
    """Connect to the first of these: `address`; the server that `settings`, TEMPORAL_ADDRESS,
    TEMPORAL_PROFILE or Temporal's TOML file name; the stack of this home; localhost:7233.

    `settings`: by default those of this process. Raises: ConfigurationError if no server answers,
    or if the settings are wrong.
    """
    settings = settings or load_settings()
    if address or configured_address(settings):
        return await connect_to(configured_server(settings, address or ""), settings, runtime)
    here = local_stack_address.address(settings)
    if here is None and process_environment.variables().get("TEMPORAL_ADDRESS") == "":
        raise ConfigurationError(
            f"TEMPORAL_ADDRESS is empty and nothing runs in {settings.home}, the home: set it to a "
            f"server's address, or unset it for {DEFAULT_ADDRESS}"
        )
    return await connect_to(dev_server(settings, here or DEFAULT_ADDRESS), settings, runtime)


async def connect_to(server: Server, settings: Settings, runtime: Runtime | None = None) -> Client:
    """Raises: ConfigurationError if no server answers there."""
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

    If the server refuses to say, for example because of the API key's permissions, assume that it
    has.
    """
    asked = DescribeNamespaceRequest(namespace=client.namespace)
    try:
        await retry.retry_call(
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
    """Tracing interceptors; empty without traces, or in a process that lacks OpenTelemetry."""
    if not tracing.wanted(settings) or not tracing.importable():
        return []
    from perdure.client.tracing_interceptor import interceptors

    return interceptors()


def _reason(error: Exception) -> str:
    """The innermost of the SDK's nested messages."""
    found = re.findall(r'message: "([^"]*)"', str(error))
    return str(found[-1] if found else error)[:200]


def _let_native_threads_end() -> None:
    """Wait a moment at exit. Without this, one short script in four aborts after its work is done.

    The process aborts if a native thread of the SDK delivers a result during interpreter teardown
    (temporalio/sdk-python#300), and the SDK offers no way to wait for its threads.
    """
    gc.collect()
    time.sleep(EXIT_PAUSE_S)
