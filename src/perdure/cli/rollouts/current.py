"""The current step of an open rollout. Imports Temporal only when it asks for the step."""

from perdure.errors import PerdureError
from perdure.settings.tree import Settings


async def current_step(settings: Settings, workflow_id: str) -> str:
    """One line; empty if the rollout is closed or no Temporal server answers."""
    from perdure.cli.connection import connect
    from perdure.cli.runs import steps

    try:
        return await steps.current_step((await connect(settings)).perdure.client, workflow_id)
    except PerdureError:
        return ""
