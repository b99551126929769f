"""Connects a command to Temporal: to the user's server, or else to the stack of this home."""

import contextlib

from temporalio.runtime import Runtime

from perdure import tracing
from perdure.client import search_attribute_keys as attributes
from perdure.client.sdk import Perdure
from perdure.client.temporal_server import configured_address
from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_lifecycle
from perdure.telemetry import temporal_runtime


class Connection:
    """A connection to Temporal, and links to its web UI."""

    def __init__(self, perdure: Perdure, ui_url: str) -> None:
        self.perdure = perdure
        self.ui_url = ui_url

    def link(self, workflow_id: str) -> str:
        """The page of a workflow in the web UI; empty if there is no UI."""
        if not self.ui_url:
            return ""
        from urllib.parse import quote

        namespace = self.perdure.client.namespace
        return f"{self.ui_url}/namespaces/{namespace}/workflows/{quote(workflow_id, safe='')}"

    @property
    def address(self) -> str:
        """Temporal's address, for the `temporal` command."""
        return self.perdure.client.service_client.config.target_host

    def failed(self, run_id: str) -> str:
        """The web UI's list of a run's failed workflows; empty if there is no UI."""
        return failed_link(self.ui_url, self.perdure.client.namespace, run_id)


def failed_link(ui_url: str, namespace: str, run_id: str) -> str:
    """The list of a run's failed workflows: rollouts without a verdict, refused inputs."""
    if not ui_url:
        return ""
    from urllib.parse import urlencode

    query = f"{attributes.RUN.name} = '{run_id}' AND ExecutionStatus = 'Failed'"
    return f"{ui_url}/namespaces/{namespace}/workflows?{urlencode({'query': query})}"


def viewer_link(settings: Settings, run_id: str) -> str:
    """The run's page in `perdure view` if a setting names the viewer's address, otherwise empty."""
    from perdure.viewer import page_links

    root = settings.temporal.viewer_url
    return f"{root.rstrip('/')}{page_links.run(run_id)}" if root else ""


async def connect(settings: Settings) -> Connection:
    """Raises: ConfigurationError if nothing runs here and no address is given."""
    ui_url = _ui_url(settings)
    tracing.configure(settings, "cli")
    with contextlib.suppress(RuntimeError):  # this process has a runtime already
        # The SDK's default runtime logs to stdout. Port 0: only services serve metrics.
        Runtime.set_default(temporal_runtime(settings.changed(metrics={"port": 0})))
    return Connection(await Perdure.connect(settings=settings), ui_url)


def known_ui(settings: Settings) -> str:
    """The address of the web UI; empty if none is known or nothing runs here."""
    try:
        return _ui_url(settings)
    except ConfigurationError:
        return ""


def _ui_url(settings: Settings) -> str:
    if configured_address(settings) is not None:
        return settings.temporal.ui_url
    state = stack_lifecycle.running(settings)
    if state is None:
        raise ConfigurationError(
            f"no stack runs in the home {settings.home}: start one with `perdure up`, set PERDURE_HOME to"
            " another home, or set TEMPORAL_ADDRESS to a Temporal server with workers"
        )
    return state.ui_url
