"""`perdure eval`: `perdure run` that says first what it may cost, and at the end what it came to."""

from typing import Any

import click

from perdure.cli.commands.run_options import OPTIONS, play, read, with_options


@click.command("eval")
@with_options(*OPTIONS)
def evaluate(**given: Any) -> None:
    """Evaluate an agent and a model: a run, its estimate before, its report after.

    SOURCE and options are those of `perdure run`; `verified`, `lite`, `multilingual`, `multimodal` and
    `pro` mean the sets of SWE-bench. The same command again joins the run.

    \b
    perdure eval verified --model X -k 4 --prices p.toml --max-cost 50

    Ctrl-C does not stop the run. Exit code 1: a rollout failed, or the
    budget left some without a verdict.
    """
    play(*read(**given), reports=True)
