"""`python -m perdure.stack.temporal_setup [--own ADDRESS]`: prepares Temporal for rollouts.

It waits until the server answers, registers our search attributes and prints one line of JSON with the
namespace and a warning, which may be empty. It is a separate process so that the long-running
supervisor need not load Temporal's SDK. `--own` names the stack's own server; the default is the user's.
"""

import argparse
import asyncio
import json
import os
import sys
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.namespace.v1 import NamespaceConfig
from temporalio.api.operatorservice.v1 import (
    AddSearchAttributesRequest,
    ListSearchAttributesRequest,
)
from temporalio.api.workflowservice.v1 import UpdateNamespaceRequest
from temporalio.client import Client
from temporalio.runtime import Runtime
from temporalio.service import RPCError

from perdure import retry
from perdure.client import temporal_names
from perdure.client.deployment_routing import explain_own_build_routing
from perdure.client.temporal_client import connect, connect_to
from perdure.client.temporal_server import dev_server
from perdure.errors import ConfigurationError
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.stack.error_lines import explain
from perdure.telemetry import configure_logging, temporal_runtime

PAUSE_S = 0.05
RETENTION = timedelta(days=7)
"""By default the dev server keeps closed workflows for a day. Resuming by id should work for a week."""


async def prepare(settings: Settings, own: str | None) -> dict[str, str]:
    """`own`: the address of the stack's own server. Raises: RPCError if that server refuses."""
    client = await wait_for_temporal(own, settings)
    prepared = {"namespace": client.namespace, "warning": ""}
    try:
        await register_search_attributes(client)
        if own is not None:
            await keep_closed_workflows(client)
        prepared["warning"] = await explain_own_build_routing(client, settings.deployment)
    except RPCError as error:
        if own is not None:
            raise
        # On the user's own server this may need an operator (infra/temporal).
        prepared["warning"] = f"search attributes: {error}"
    return prepared


async def wait_for_temporal(address: str | None, settings: Settings) -> Client:
    """Try to connect until the server answers. `address`: our own dev server; None: the user's."""

    async def connected() -> Client:
        if address is None:
            return await connect(settings=settings)
        return await connect_to(dev_server(settings, address), settings)

    return await retry.retry_call(connected, ConfigurationError, pauses=(PAUSE_S, PAUSE_S))


async def register_search_attributes(client: Client) -> list[str]:
    """Add the missing search attributes; return their names. Raises: RPCError if that is not allowed."""
    missing = await _missing(client)
    if missing:
        types = {name: _value_type(temporal_names.SEARCH_ATTRIBUTES[name]) for name in missing}
        await client.operator_service.add_search_attributes(
            AddSearchAttributesRequest(search_attributes=types, namespace=client.namespace)
        )
        while await _missing(client):
            await asyncio.sleep(PAUSE_S)
    return missing


async def keep_closed_workflows(client: Client) -> None:
    """Set the namespace's retention to a week."""
    await client.workflow_service.update_namespace(
        UpdateNamespaceRequest(
            namespace=client.namespace,
            config=NamespaceConfig(
                workflow_execution_retention_ttl=Duration(seconds=int(RETENTION.total_seconds()))
            ),
        )
    )


async def _missing(client: Client) -> list[str]:
    known = await client.operator_service.list_search_attributes(
        ListSearchAttributesRequest(namespace=client.namespace)
    )
    return [
        name for name in temporal_names.SEARCH_ATTRIBUTES if name not in known.custom_attributes
    ]


def _value_type(name: str) -> "IndexedValueType.ValueType":
    return IndexedValueType.Value(f"INDEXED_VALUE_TYPE_{name.upper()}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m perdure.stack.temporal_setup")
    parser.add_argument("--own", metavar="ADDRESS")
    options = parser.parse_args()
    configure_logging("temporal-setup")
    try:
        settings = load_settings()
        Runtime.set_default(temporal_runtime(settings.changed(metrics={"port": 0})))
        print(json.dumps(asyncio.run(prepare(settings, options.own))), flush=True)
    except Exception as error:
        code, line = explain(error)
        print(line, file=sys.stderr, flush=True)
        return code
    return 0


if __name__ == "__main__":
    # The SDK's native threads can crash Python during shutdown.
    os._exit(main())
