"""What a reward model gets to see of a rollout: the work that it scores."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from perdure.episodes.turns_parquet import TurnTexts, decode_texts
from perdure.errors import AttemptDamaged, NotFound
from perdure.rollouts.attempt_job import Job
from perdure.types import Grade, Purpose


@dataclass(frozen=True)
class Work:
    """One patch with its task."""

    instance_id: str
    problem: str
    patch: bytes
    """The diff as captured. Hostile code may have written it."""
    last_message: str
    """The text of the agent's last turn; empty if there is none."""
    tests: Grade | None
    """The tests' verdict; None if they did not run."""


async def work_of(job: Job, patch: bytes, tests: Grade | None) -> Work:
    """Raises: AttemptDamaged if the recorded turns are unreadable."""
    return Work(
        instance_id=job.request.instance_id,
        problem=job.instance.problem_statement,
        patch=patch,
        last_message=await _last_message(job),
        tests=tests,
    )


async def _last_message(job: Job) -> str:
    key = job.key("turns.parquet")
    try:
        return last_text(decode_texts((await job.services.store.get(key)).data))
    except NotFound:  # the agent calls no model
        return ""
    except ValueError as error:
        raise AttemptDamaged(f"{key} is unreadable: {error}") from error


def last_text(turns: Iterable[TurnTexts]) -> str:
    """The text of the last turn that has one, without side calls."""
    last = ""
    for turn in turns:
        if Purpose(turn.purpose).is_of_trajectory and turn.answer:
            said = json.loads(turn.answer).get("content")
            last = said if isinstance(said, str) and said.strip() else last
    return last
