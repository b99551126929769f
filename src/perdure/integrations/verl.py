"""verl: turns segments into the `AgentLoopOutput`s of an agent loop."""

from typing import Any

from perdure.episodes.episode import EpisodeSegments
from perdure.episodes.trainer_formats import verl_outputs
from perdure.integrations import trainer_imports


def agent_loop_outputs(found: EpisodeSegments) -> list[Any]:
    """One `AgentLoopOutput` per segment (a dict if verl is not installed); none for a failed rollout."""
    rows = verl_outputs(found)
    output = trainer_imports.find("verl.experimental.agent_loop.agent_loop", "AgentLoopOutput")
    return rows if output is None else [output(**row) for row in rows]
