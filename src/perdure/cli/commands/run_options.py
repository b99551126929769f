"""Options of `perdure run` and `perdure eval`; `grade`, `retry`, `regrade` and `watch` take some."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from perdure.cli.commands import completion
from perdure.cli.commands.option_types import duration, share
from perdure.cli.console import json_option, say

if TYPE_CHECKING:
    from perdure.cli.runs.run_launcher import CheckedRun
    from perdure.cli.runs.run_request import RunOptions
    from perdure.settings.settings_tree import Settings

Command = TypeVar("Command", bound=Callable[..., Any])
FAILURES = (
    *("SandboxLost", "CallUnanswered", "AgentError", "EngineRefused", "InstanceError"),
    *("TokenizerChanged", "ActivityTimeout", "UnexpectedError"),
)
"""Copies `perdure.types.requests.FailureType`, so that `--help` need not import it."""


@dataclass(frozen=True)
class LaunchOptions:
    """How a command starts and follows a run; RunOptions says what it runs."""

    wait: bool = True
    dry_run: bool = False
    as_json: bool = False
    notify: str = ""
    prices: Path | None = None
    like: str | None = None


def _only_one(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> str:
    """Refuse a second --agent: click alone would silently take the last one."""
    if len(given) > 1:
        raise click.BadParameter(f"give one agent, not {len(given)}")
    return given[0]


CONCURRENCY = click.option(
    *("-c", "--concurrency", "concurrency"),
    type=click.IntRange(1, 2000),
    metavar="N",
    help="Rollouts in flight; repeat the command with another N to change it.  [default: 8]",
)
RUN_ID = click.option(
    "--run-id", metavar="ID", help="Name of the run.  [default: made from SOURCE and options]"
)
NEW = click.option("--new", is_flag=True, help="Start a new run even if this one exists.")
SANDBOX = click.option(
    "--sandbox",
    metavar="S",
    shell_complete=completion.sandboxes,
    help="Sandbox provider for agents and graders.  [default: bubblewrap]",
)
SET = click.option(
    *("--set", "assignments"),
    multiple=True,
    metavar="KEY=VALUE",
    help="Set any field of a rollout, e.g. sampling.temperature=0.7.",
)
WAIT = click.option(
    "--wait/--detach", default=True, help="Follow the run to its end (default), or return at once."
)
NOTIFY = click.option(
    "--notify",
    default="",
    metavar="CMD",
    help="Shell command to call when the run ends or waits for you; $RUN_TEXT says why, $RUN_ID names"
    " the run.",
)

OPTIONS = (
    click.argument("source", shell_complete=completion.datasets),
    click.option(
        *("--agent", "-a", "agent"),
        default=["mini_swe_agent"],
        multiple=True,
        callback=_only_one,
        show_default=True,
        metavar="A",
        shell_complete=completion.agents,
        help="A registered name, or package.module:Class.",
    ),
    click.option(
        *("-n", "-k", "--samples", "samples"),
        type=click.IntRange(1, 512),
        metavar="N",
        help="Rollouts per instance; repeat the command with another N to change it.  [default: 1]",
    ),
    CONCURRENCY,
    RUN_ID,
    NEW,
    click.option(
        "-i", "--include", multiple=True, metavar="GLOB", help="Only instance ids that match."
    ),
    click.option(
        "-x", "--exclude", multiple=True, metavar="GLOB", help="Skip instance ids that match."
    ),
    click.option("-l", "--limit", type=click.IntRange(1), metavar="N", help="At most N instances."),
    SANDBOX,
    click.option(
        "--model", metavar="M", help="Model that answers the agent: see `perdure engines list`."
    ),
    click.option(
        "--policy-version",
        type=click.IntRange(0),
        metavar="V",
        help="Version of the weights that must sample the rollouts.",
    ),
    click.option(
        "--max-staleness",
        type=click.IntRange(0),
        metavar="K",
        help="Use only engines at versions V to V+K.  [default: any]",
    ),
    click.option(
        "--budget",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="Time limit of each agent.",
    ),
    click.option(
        *("--mcp", "mcp"),
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="MCP servers whose tools agents may call, as in .mcp.json.",
    ),
    SET,
    click.option(
        "--no-grade",
        is_flag=True,
        help="Only generate: capture the patches, and grade them later with `perdure grade RUN`.",
    ),
    click.option("--skip-bad-rows", is_flag=True, help="Leave out unusable rows."),
    WAIT,
    click.option("--dry-run", is_flag=True, help="Print what would run and exit."),
    click.option(
        "--max-tokens",
        type=click.IntRange(1),
        metavar="N",
        help="Stop the run once ended rollouts have used N tokens. Agents still running are stopped and"
        " their patches graded.",
    ),
    click.option(
        "--max-cost",
        type=click.FloatRange(0, min_open=True),
        metavar="USD",
        help="The same limit in dollars; needs --prices.",
    ),
    click.option(
        "--max-rollout-turns",
        type=click.IntRange(1),
        metavar="N",
        help="Stop each agent after N model calls and grade its patch.",
    ),
    click.option(
        "--max-rollout-tokens",
        type=click.IntRange(1),
        metavar="N",
        help="Stop each agent once its calls have used N tokens, and grade its patch.",
    ),
    click.option(
        "--max-rollout-cost",
        type=click.FloatRange(0, min_open=True),
        metavar="USD",
        help="The same limit in dollars; needs --prices.",
    ),
    click.option(
        "--deadline",
        type=duration,
        metavar="TIME",
        help="End the run this long after its start, e.g. 4h or 1h30m: running agents are stopped and"
        " their patches kept. Repeat the command to continue.",
    ),
    click.option(
        "--stop-at",
        type=share,
        metavar="SHARE",
        help="Stop the last rollouts in the same way once this share has ended, e.g. 98%.",
    ),
    click.option(
        "--prices",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Prices of models, as for `perdure report`.",
    ),
    click.option(
        "--like", metavar="RUN", help="Estimate tokens, cost and time from this run's rollouts."
    ),
    click.option(
        "--retry-on",
        multiple=True,
        type=click.Choice(FAILURES),
        metavar="T",
        help="Also retry after this failure, e.g. AgentError.",
    ),
    click.option(
        "--no-retry-on",
        multiple=True,
        type=click.Choice(FAILURES),
        metavar="T",
        help="Do not retry after this failure.  [default: retry only after SandboxLost and CallUnanswered]",
    ),
    click.option(
        "--start-jitter",
        type=click.FloatRange(0, 3600),
        metavar="SECONDS",
        help="Delay each rollout's start by a random time up to SECONDS.",
    ),
    click.option(
        "--priority",
        type=click.IntRange(1, 5),
        metavar="P",
        help="1 goes before other runs, 5 after them.  [default: 3]",
    ),
    NOTIFY,
    json_option,
)


def with_options(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """A decorator that gives a command these options; its help lists them in this order."""

    def given(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return given


def read(
    *,
    assignments: tuple[str, ...],
    sandbox: str | None,
    model: str | None,
    policy_version: int | None,
    max_staleness: int | None,
    budget: float | None,
    mcp: Path | None,
    no_grade: bool,
    max_tokens: int | None,
    max_cost: float | None,
    max_rollout_turns: int | None,
    max_rollout_tokens: int | None,
    max_rollout_cost: float | None,
    deadline: float | None,
    stop_at: float | None,
    prices: Path | None,
    like: str | None,
    retry_on: tuple[str, ...],
    no_retry_on: tuple[str, ...],
    start_jitter: float | None,
    priority: int | None,
    wait: bool,
    dry_run: bool,
    as_json: bool,
    notify: str,
    **options: Any,
) -> "tuple[Settings, RunOptions, LaunchOptions]":
    """Turn the command line into settings, run options and launch options. Raises: ConfigurationError."""
    from perdure.cli.runs import mcp_file
    from perdure.cli.runs.run_request import RunOptions, budget_of, caps_of, fields_of, retried
    from perdure.client.request_defaults import defaults_for
    from perdure.data_source_handlers import import_handlers
    from perdure.settings.settings_loader import load_settings

    named: dict[str, Any] = {
        "sandbox": sandbox,
        "model": model,
        "policy_version": policy_version,
        "max_staleness": max_staleness,
        "agent_budget_s": budget,
        "retry_on": retried(retry_on, no_retry_on),
        "grading": "later" if no_grade else None,
        "mcp_servers": mcp_file.read(mcp) if mcp is not None else None,
    }
    settings = load_settings()
    limits = {
        "turns": max_rollout_turns,
        "tokens": max_rollout_tokens,
        "dollars": max_rollout_cost,
    }
    given = {name: value for name, value in named.items() if value is not None}
    named_model = str(fields_of(assignments, given).get("model", ""))
    if caps := caps_of(settings, limits, prices, named_model):
        given["caps"] = caps
    fields = defaults_for(fields_of(assignments, given), str(options["agent"]))
    import_handlers(settings.handlers)
    bought = budget_of(settings, max_tokens, max_cost, prices, str(fields.get("model", "")))
    of_run = {
        "budget": bought,
        "start_jitter_s": start_jitter,
        "priority": priority,
        "deadline_s": deadline,
        "stop_at": stop_at,
    }
    asked = RunOptions(
        fields=fields,
        of_run={name: value for name, value in of_run.items() if value is not None},
        **options,
    )
    return settings, asked, LaunchOptions(wait, dry_run, as_json, notify, prices, like)


def play(
    settings: "Settings", asked: "RunOptions", launch: LaunchOptions, *, reports: bool = False
) -> None:
    """Run it, or with --dry-run print what would run.

    `reports`: print a cost estimate before the run and its report after it.
    """
    import asyncio

    from perdure.cli.runs import run_launcher

    planned = asyncio.run(run_launcher.plan(settings, asked, dry_run=launch.dry_run))
    if code := follow(settings, planned, launch, reports=reports):
        raise click.exceptions.Exit(code)


def follow(
    settings: "Settings", planned: "CheckedRun", launch: LaunchOptions, *, reports: bool
) -> int:
    """`play` for a run that is planned. Returns the exit code."""
    import asyncio

    from perdure.cli.runs import run_launcher

    if (reports or launch.dry_run or launch.like) and not launch.as_json:
        say_estimate(settings, planned, launch)
    if launch.dry_run:
        run_launcher.show(planned, as_json=launch.as_json)
        return 0
    code = run_launcher.play(
        settings, planned, wait=launch.wait, as_json=launch.as_json, notify=launch.notify
    )
    if reports and launch.wait and not launch.as_json:
        from perdure.cli.runs import run_reports

        run_id = planned.request.run_id
        run_reports.print_text(asyncio.run(run_reports.make(settings, [run_id], launch.prices)))
    return code


def say_estimate(settings: "Settings", planned: "CheckedRun", launch: LaunchOptions) -> None:
    import asyncio

    from perdure.cli.runs.cost_estimate import estimate

    for line in asyncio.run(estimate(settings, planned, launch.like, launch.prices)):
        say(line)
