"""Estimates what a planned run may need and cost, before it starts."""

import os
from collections.abc import Sequence
from pathlib import Path

from perdure.cli.console import many
from perdure.cli.runs.run_launcher import CheckedRun
from perdure.errors import NotFound
from perdure.reports.rollout_facts import RolloutFacts, read_facts
from perdure.reports.token_prices import read_prices
from perdure.sandboxes import phase_specs
from perdure.settings.settings_tree import Settings
from perdure.stack.home_providers import provider
from perdure.storage.store_url import open_store

HOUR_S = 3600.0


async def estimate(
    settings: Settings, planned: CheckedRun, like: str | None, prices: Path | None
) -> list[str]:
    """Lines to print. `like`: a run whose rollouts the estimate is based on; `prices`: a file.

    Raises: NotFound if that run has no rollout that called a model; ConfigurationError.
    """
    request = planned.request
    rollout = request.rollout_request("any/instance")
    place = phase_specs.place(rollout, None, "agent")
    rollouts = planned.rollouts
    at_once = min(request.concurrency, rollouts)
    here = _this_host() if provider(settings, place.provider).host_bound else ""
    hours = rollouts * rollout.agent_budget_s / at_once / HOUR_S
    lines = [
        f"{many(rollouts, 'rollout')}, {at_once} at once: up to {at_once * place.limits.cpus:g} CPUs and"
        f" {at_once * place.limits.memory_mb / 1024:.0f} GB{here}",
        f"agents: at most {hours:.1f} h in total, {rollout.agent_budget_s:g} s each",
    ]
    if like is None:
        told = "cost: unknown; --like RUN estimates it from a run of a few instances (-l 5)"
        return [*lines, told]
    found = [one for one in (await read_facts(open_store(settings), like)).rollouts if one.turns]
    if not found:
        raise NotFound(f"--like {like}: no rollout of this run called a model; name another run")
    seconds = sum(one.seconds for one in found) / len(found) * rollouts / at_once
    tokens = sum(one.spent_tokens for one in found) / len(found) * rollouts
    price = _dollars(found, prices, rollouts)
    return [*lines, f"like {like}: about {tokens:,.0f} tokens, {seconds / HOUR_S:.1f} h{price}"]


def _dollars(found: Sequence[RolloutFacts], prices: Path | None, rollouts: int) -> str:
    if prices is None:
        return "; --prices FILE gives dollars"
    known = read_prices(prices)
    if missing := known.missing(found):
        return f"; {prices} has no price for {', '.join(missing)}"
    costs = known.costs(found)
    if not costs:
        return "; the cost is unknown, because that run has no token counts by model"
    return f", {sum(costs) / len(costs) * rollouts:,.2f} dollars"


def _this_host() -> str:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return f"; this host has {os.cpu_count()} CPUs and {memory:.0f} GB"
