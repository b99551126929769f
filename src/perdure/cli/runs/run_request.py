"""Turns a command line into a RunRequest and checks every option before anything starts."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue, ValidationError

from perdure import variant_registry
from perdure.agents.agent_validation import check_options
from perdure.cli.runs.instance_selection import SHORT_LIST, Selection, chosen
from perdure.errors import ConfigurationError
from perdure.instances import calibration_record, instance_catalog
from perdure.instances.calibration_record import Mark
from perdure.reports.token_prices import Prices, read_prices
from perdure.sandboxes import phase_specs
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.types import DEFAULT_MODEL, Budget, Price, RolloutRequest, RunRequest, slugify
from perdure.types.validation_errors import faults


@dataclass(frozen=True)
class RunOptions:
    """The command line of a run. `fields`: fields of RolloutRequest."""

    source: str
    agent: str
    samples: int | None = None
    concurrency: int | None = None
    run_id: str | None = None
    new: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    limit: int | None = None
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    of_run: Mapping[str, Any] = field(default_factory=dict)
    """Fields of RunRequest that are not part of its identity: budget, deadline_s, priority, ... In a
    run that exists, a field that is not given, here or above, keeps its value."""
    skip_bad_rows: bool = False


def fields_of(assignments: Sequence[str], named: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """`["sampling.temperature=0.7"]` -> `{"sampling": {"temperature": 0.7}}`, merged into `named`.

    A value that is not JSON is taken as text. Raises: ConfigurationError.
    """
    fields: dict[str, Any] = dict(named)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            raise ConfigurationError(f"--set {assignment}: write it as KEY=VALUE")
        if path == "agent":
            raise ConfigurationError(f"--set {assignment}: set the agent with --agent")
        *parents, name = path.split(".")
        target = fields
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                raise ConfigurationError(f"--set {assignment}: {parent!r} has no fields")
        target[name] = _value(text)
    return fields


def retried(more: Sequence[str], fewer: Sequence[str]) -> list[str] | None:
    """`retry_on` of a rollout; None means the default. Raises: ConfigurationError."""
    if both := set(more) & set(fewer):
        raise ConfigurationError(f"--retry-on and --no-retry-on both name {min(both)}: keep one")
    default = RolloutRequest.model_fields["retry_on"].default
    asked = [one for one in dict.fromkeys((*default, *more)) if one not in fewer]
    return asked if more or fewer else None


def budget_of(
    settings: Settings, tokens: int | None, dollars: float | None, prices: Path | None, model: str
) -> Budget | None:
    """The run's budget; None means no limit. Raises: ConfigurationError if the price is unknown."""
    if tokens is None and dollars is None:
        return None
    if dollars is None:
        return Budget(tokens=tokens)
    price, known = _price(settings, prices, model, "--max-cost")
    own = known.of(settings.engine.model)
    others = {**({DEFAULT_MODEL: own} if own is not None else {}), **known.by_model}
    return Budget(tokens=tokens, dollars=dollars, price=price, other_prices=others)


def caps_of(
    settings: Settings, given: Mapping[str, JsonValue], prices: Path | None, model: str
) -> dict[str, JsonValue]:
    """The given fields of a rollout's caps, with the price for a limit in dollars.

    Raises: ConfigurationError if the price is unknown.
    """
    caps: dict[str, JsonValue] = {name: one for name, one in given.items() if one is not None}
    if "dollars" in caps:
        price, _ = _price(settings, prices, model, "--max-rollout-cost")
        caps["price"] = price.model_dump(mode="json", exclude_none=True)
    return caps


def _price(
    settings: Settings, prices: Path | None, model: str, option: str
) -> tuple[Price, Prices]:
    """The policy's price, and all prices of the file. Raises: ConfigurationError."""
    if prices is None:
        raise ConfigurationError(f"{option} needs --prices FILE with the model's price")
    names = [name for name in (settings.engine.model, model) if name]
    known = read_prices(prices)
    price = known.of(*names)
    if price is None:
        raise ConfigurationError(
            f"{prices} has no price for {' or '.join(names) or 'the model'}: add it, and name the"
            " model with --model or PERDURE_ENGINE__MODEL"
        )
    return price, known


def check(options: RunOptions) -> RolloutRequest:
    """Check all names and fields of the rollouts before any instance is read; return one rollout.

    Raises: ConfigurationError.
    """
    run = RunRequest(run_id="x", instances=("x/x",), rollout=_rollout(options))
    try:
        rollout = run.rollout_request("x/x")
    except ValidationError as error:
        raise ConfigurationError(faults(error, RolloutRequest)) from None
    check_options(rollout.agent, rollout.agent_options, rollout.mcp_servers, rollout.user)
    for name in (rollout.sandbox, *named_in_phases(rollout)):
        variant_registry.load("sandbox", variant_registry.SANDBOXES, name)
    return rollout


def build(options: RunOptions, source: Selection) -> RunRequest:
    """The request for a checked command line.

    Raises: pydantic.ValidationError for a bad run id; ConfigurationError for a price that is missing.
    """
    short = source.refs is not None and len(source.refs) <= SHORT_LIST
    request = dict(
        run_id=options.run_id or _run_id(options, source),
        instances=source.refs if short and source.refs is not None else (),
        dataset=None if short else source.dataset,
        include=options.include,
        exclude=options.exclude,
        limit=options.limit,
        rollout=_rollout(options),
    )
    numbers = {"n_samples": options.samples, "concurrency": options.concurrency}
    given = {name: number for name, number in numbers.items() if number is not None}
    asked = RunRequest.model_validate(request | given | dict(options.of_run))
    asked.check_prices()
    return asked


async def instances_of(
    store: Store, request: RunRequest, source: Selection
) -> tuple[list[str], dict[str, Mark]]:
    """The instances that the run's first activity will select, and the calibration of all matches.

    A dataset's quarantined rows are missing from the list, not from the marks. Raises:
    ConfigurationError.
    """
    refs = list(
        await instance_catalog.refs(store, source.dataset) if source.refs is None else source.refs
    )
    found = chosen(refs, request.include, request.exclude)
    if not found:
        some = ", ".join(ref.split("/", 1)[1] for ref in refs[:3])
        raise ConfigurationError(
            f"--include / --exclude select none of {len(refs)} instances (such as {some})"
        )
    grades = phase_specs.place(request.rollout_request("any/instance"), None, "grade")
    said = await calibration_record.marks(store, found, grades.provider)
    bad = calibration_record.quarantined(said) if source.refs is None else {}
    kept = [ref for ref in found if ref not in bad]
    if not kept:
        ref, reason = next(iter(bad.items()))
        raise ConfigurationError(
            f"every instance is quarantined: {ref}: {reason}; name one to run it anyway"
        )
    return kept[: request.limit], said


def needs_model(agent: str) -> bool:
    return bool(variant_registry.load("agent", variant_registry.AGENTS, agent).needs_model)


def named_in_phases(rollout: RolloutRequest) -> list[str]:
    """Sandbox providers that single phases name."""
    phases = rollout.phases
    all_three = (phases.environment, phases.agent, phases.grade)
    return [phase.provider for phase in all_three if phase.provider]


def _rollout(options: RunOptions) -> dict[str, JsonValue]:
    return {**options.fields, "agent": options.agent}


def _run_id(options: RunOptions, source: Selection) -> str:
    """Made without the options that may change, so that the same command with another --limit or -n
    joins the run. `--new` adds the time."""
    asked = [
        *(source.digest, options.agent),
        *(list(options.include), list(options.exclude), options.fields),
    ]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
    parts = [slugify(source.label)[:60], slugify(options.agent.rpartition(":")[2])[:30], digest]
    if options.new:
        parts.append(time.strftime("%m%d-%H%M%S"))
    return "-".join(parts)


def _value(text: str) -> JsonValue:
    try:
        value: JsonValue = json.loads(text)
    except ValueError:
        return text
    return value
