"""The command that samples a run again."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from perdure.reports.redaction import redacted
from perdure.types import GIVEN_PATCHES, RolloutRequest, RunRequest

DEFAULT_AGENT = RolloutRequest.model_fields["agent"].default
NOT_SAMPLED = ("agent", "grading")
"""Fields that have their own option, or that change no result."""
PREDICTIONS = "predictions.json"
ADOPTED = "adopted-folder"


def reproducing_command(request: RunRequest, model: str) -> str:
    """A line for a POSIX shell. `model`: what the engine settings named; empty if unknown.

    Example: perdure run swe-bench-verified --agent mini_swe_agent -n 4 --set sampling.seed=7 --new
    """
    fields = {name: one for name, one in request.rollout.items() if name not in NOT_SAMPLED}
    agent = str(request.rollout.get("agent", DEFAULT_AGENT))
    if agent == GIVEN_PATCHES:
        fields = {name: one for name, one in fields.items() if name != "agent_options"}
        words = ["perdure", "grade", *_source(request), "-p", PREDICTIONS]
    else:
        words = ["perdure", "run"]
        if fields.pop("adopted_sha256", ""):
            words = ["perdure", "adopt", ADOPTED, "--dataset"]
        words += [*_source(request), "--agent", agent, "-n", str(request.n_samples)]
        words += _of_run(request)
    for name, value in dotted(redacted(fields)):
        words += ["--set", f"{name}={_as_option(value)}"]
    is_named = not model or "model" in fields
    before = "" if is_named else f"PERDURE_ENGINE__MODEL={shlex.quote(redacted(model))} "
    return before + shlex.join([*words, "--new"])


def _source(request: RunRequest) -> list[str]:
    if request.dataset is not None:
        chosen = [word for one in request.include for word in ("-i", one)]
        chosen += [word for one in request.exclude for word in ("-x", one)]
        return [request.dataset, *chosen, *(["-l", str(request.limit)] if request.limit else [])]
    if len(request.instances) == 1:
        return list(request.instances)
    dataset = request.instances[0].split("/", 1)[0]
    ids = (ref.split("/", 1)[1] for ref in request.instances)
    return [dataset, *(word for one in ids for word in ("-i", one))]


def _of_run(request: RunRequest) -> list[str]:
    """Options for the limits that may end rollouts."""
    words = []
    if request.budget.tokens is not None:
        words += ["--max-tokens", str(request.budget.tokens)]
    if request.budget.dollars is not None:
        words += ["--max-cost", str(request.budget.dollars), "--prices", "prices.toml"]
    if request.deadline_s is not None:
        words += ["--deadline", f"{request.deadline_s:.0f}s"]
    if request.stop_at is not None:
        words += ["--stop-at", f"{100 * request.stop_at:g}%"]
    return words


def dotted(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`{"sampling": {"seed": 7}}` -> `("sampling.seed", 7)`, sorted."""
    for name, value in sorted(fields.items()):
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _as_option(value: Any) -> str:
    """Keep a string as it is, unless it could be read as JSON."""
    return value if isinstance(value, str) and not _is_json(value) else json.dumps(value)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
