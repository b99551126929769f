"""Stuck rollouts as text and as JSON."""

from collections.abc import Callable, Iterator
from typing import Any

from perdure.cli.console import many
from perdure.cli.runs.run_text import clock
from perdure.cli.runs.stuck_rollouts import StuckRollout, StuckRollouts

SHOWN = 20
"""Rollouts listed with one problem."""
Link = Callable[[str], str]
"""The address of a workflow in the Web UI; empty if there is no UI."""


def lines(found: StuckRollouts, link: Link) -> Iterator[str]:
    """A block for each problem: its step, what helps, and its rollouts, the longest stuck first."""
    some = f"; the {found.checked} oldest were checked" if found.checked < found.open else ""
    yield f"{len(found.stuck)} of {many(found.open, 'open rollout')} stuck{some}"
    problems: dict[tuple[str, str], list[StuckRollout]] = {}
    for one in found.stuck:
        problems.setdefault((one.step, one.reason.helps), []).append(one)
    for (step, helps), alike in problems.items():
        yield f"\n{step}, {many(len(alike), 'rollout')}: {helps}"
        for one in alike[:SHOWN]:
            yield f"  {_name(one)} for {clock(one.seconds)}, try {one.tries}: {one.reason.why}"
            if url := link(one.rollout.workflow_id):
                yield f"    {url}"
        if len(alike) > SHOWN:
            yield f"  {len(alike) - SHOWN} more; --json lists all of them"


def document(found: StuckRollouts, link: Link) -> dict[str, Any]:
    return {
        "open": found.open,
        "checked": found.checked,
        "stuck": [_document(one, link) for one in found.stuck],
    }


def _document(one: StuckRollout, link: Link) -> dict[str, Any]:
    return {
        "workflow_id": one.rollout.workflow_id,
        "step": one.step,
        "seconds": round(one.seconds, 3),
        "tries": one.tries,
        "why": one.reason.why,
        "helps": one.reason.helps,
        "web_ui": link(one.rollout.workflow_id),
    }


def _name(one: StuckRollout) -> str:
    return one.rollout.workflow_id.removeprefix("rollout/")
