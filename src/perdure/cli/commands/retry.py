"""`perdure retry | regrade`: run or grade rollouts again; their earlier files are kept."""

from pathlib import Path
from typing import Any

import click

from perdure.cli.commands import completion
from perdure.cli.commands.run_options import NOTIFY, WAIT, with_options
from perdure.cli.console import json_option

_common = with_options(
    click.argument("run_id", metavar="RUN", shell_complete=completion.runs),
    click.option(
        "--outcome",
        multiple=True,
        metavar="X",
        help="Only rollouts that ended as X: an outcome, failed, truncated, expired or missing.",
    ),
    click.option(
        *("-i", "--include"),
        multiple=True,
        metavar="GLOB",
        help="Only instance ids, or ID/SAMPLE, that match.",
    ),
    click.option(
        *("-c", "--concurrency"),
        type=click.IntRange(1, 2000),
        metavar="N",
        help="Rollouts in flight.  [default: the run's]",
    ),
    WAIT,
    click.option("--dry-run", is_flag=True, help="List the rollouts and exit."),
    NOTIFY,
    json_option,
)


@click.command()
@click.option("--failed", is_flag=True, help="Only rollouts without a verdict.  [default]")
@_common
def retry(
    *, run_id: str, failed: bool, outcome: tuple[str, ...], include: tuple[str, ...], **how: Any
) -> None:
    """Run rollouts of an ended run again.

    Without --outcome and --include, this takes the rollouts without a verdict (failed, truncated,
    cancelled, expired, missing). Such a rollout continues: if its agent had ended, it is only
    graded. `perdure grade RUN` grades ungraded ones. A rollout with a verdict starts over;
    `perdure show` names its earlier episode.

    Exit code 1: a rollout has no new verdict.
    """
    from perdure.types import NO_VERDICT, RolloutStatus

    if failed and outcome:
        raise click.UsageError("--failed and --outcome are mutually exclusive: give one of them")
    if failed or not (outcome or include):
        outcome = tuple(one for one in NO_VERDICT if one != RolloutStatus.UNGRADED)
    _play(run_id, {"outcomes": outcome, "include": include}, **how)


@click.command()
@_common
def regrade(*, run_id: str, outcome: tuple[str, ...], include: tuple[str, ...], **how: Any) -> None:
    """Grade the captured patches of a run again, for example after a grader has changed.

    No agent runs. Only the grading time of an episode changes. If grading fails, the old verdict
    stays.

    Exit code 1: a rollout has no new verdict.
    """
    if Path(run_id).exists() and Path(run_id).suffix in (".json", ".jsonl"):
        raise click.UsageError(
            f"{run_id} is a file: grade it with `perdure grade SOURCE --predictions {run_id}`"
        )
    _play(run_id, {"outcomes": outcome, "include": include, "start_at": "grade"}, **how)


def _play(run_id: str, asked: dict[str, Any], **how: Any) -> None:
    from perdure.cli.runs import rerun
    from perdure.data_source_handlers import import_handlers
    from perdure.settings.settings_loader import load_settings

    settings = load_settings()
    import_handlers(settings.handlers)
    code = rerun.play(settings, run_id, asked, **how)
    if code:
        raise click.exceptions.Exit(code)
