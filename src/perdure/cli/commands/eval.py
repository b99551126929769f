"""`perdure eval`: `perdure run` with a cost estimate before it and a report after it."""

from typing import Any

import click

from perdure.cli.commands.run_options import OPTIONS, play, read, with_options


@click.command("eval")
@with_options(*OPTIONS)
def evaluate(**given: Any) -> None:
    """Evaluate an agent and a model: an estimate, the run, a report.

    SOURCE and options are those of `perdure run`; `verified`, `lite`, `multilingual`, `multimodal`
    and `pro` name the SWE-bench sets. Repeat the command to join the run again.

    \b
    perdure eval verified --model X -k 4 --prices p.toml --max-cost 50

    Ctrl-C does not stop the run. Exit code 1: a rollout failed, or the budget ended the run before
    all rollouts had a verdict.
    """
    play(*read(**given), reports=True)
