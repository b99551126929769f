"""The current step of an open rollout. Imports Temporal only when it asks for the step."""

from perdure.errors import PerdureError
from perdure.settings.settings_tree import Settings


async def current_step(settings: Settings, workflow_id: str) -> str:
    """One line; empty if the rollout is closed or no Temporal server answers."""
    from perdure.cli.runs import rollout_progress
    from perdure.cli.temporal_connection import connect

    try:
        return await rollout_progress.current_step(
            (await connect(settings)).perdure.client, workflow_id
        )
    except PerdureError:
        return ""
