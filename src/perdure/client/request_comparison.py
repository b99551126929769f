"""The identity of a run, a group or a rollout as its request gives it, and differences to another
one.

This module is light. Workers also compare instances and engines (`perdure.rollouts.run_identity`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, JsonValue

from perdure.errors import IdentityDiffers
from perdure.types import Changeable, GroupRequest, RolloutRequest, RunRequest

Identity = dict[str, str]
"""Dotted name -> value as text, so that a difference names a single field."""

PER_START_FIELDS = {
    *("run_id", "instance", "sample_index", "group_id", "round", "start_at", "schema_version"),
    *("expires_at", "heartbeat_timeout_s", "grading"),
}
"""Fields of a rollout that do not affect its outcome."""
MAY_BE_ABSENT = ("agent_options.", "models.", "mcp_servers.", "reward_model.", "user.")
"""Prefixes of the fields that are in an identity only if the request has them."""
SHOWN = 12
"""Maximum number of differences in an error message."""


def outcome_fields(rollout: RolloutRequest) -> Identity:
    """The fields that affect the outcome of each rollout."""
    return dict(_flat("", rollout.model_dump(mode="json", exclude=PER_START_FIELDS)))


def request_identity(request: BaseModel) -> Identity:
    """The identity in a request, for the SDK, which sees neither instances nor engines."""
    if isinstance(request, RunRequest):
        return outcome_fields(request.rollout_request("any/instance"))
    if isinstance(request, GroupRequest):
        how = request.model_dump(
            mode="json", exclude={"rollout", "schema_version", *request.CHANGEABLE}
        )
        return {**outcome_fields(request.rollout), **dict(_flat("", how))}
    return outcome_fields(request) if isinstance(request, RolloutRequest) else {}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Lines of `name: old -> new`. A name that only one side has is ignored, except for instances that
    are left out and for the fields in MAY_BE_ABSENT: another version of Perdure has
    other fields, and an endpoint may not say what it serves."""
    lines = []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if None not in (old, new):
            lines.append(f"{name}: {old} -> {new}")
        elif name.startswith(MAY_BE_ABSENT):
            lines.append(f"{name}: {old or 'absent'} -> {new or 'absent'}")
        elif name.startswith("instance.") and new is None:
            lines.append(f"{name}: left out, and a run keeps its instances")
    return lines


def changes(old: Changeable, new: Changeable) -> list[str]:
    """The changeable fields of a run or a group that differ. Example: `n_samples: 2 -> 3`."""
    return differences(*(dict(_flat("", _told(one))) for one in (old, new)))


def _told(request: Changeable) -> dict[str, JsonValue]:
    """The changeable fields. A list of instances, which may be long, is told by its length."""
    fields = request.changeable()
    if isinstance(request, RunRequest):
        fields["instances"] = len(request.instances)
    return fields


def refuse(what: str, changes: Sequence[str], fix: str) -> None:
    """Raises: IdentityDiffers, which lists `changes`, if there are any."""
    if changes:
        more = f"\n  and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        told = "".join(f"\n  {line}" for line in changes[:SHOWN])
        raise IdentityDiffers(f"{what} was started with other settings:{told}{more}\n{fix}")


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else name, one)
    else:
        yield prefix, json.dumps(value)
