"""`perdure swebench`: takes the command line of mini-swe-agent's `mini-extra swebench`."""

from pathlib import Path

import click


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "--subset", default="lite", metavar="S", show_default=True, help="Or a source of rows."
)
@click.option("--split", default="dev", metavar="S", show_default=True, help="Of a hub dataset.")
@click.option("--slice", "slice_", default="", metavar="0:N", help="The first N instances.")
@click.option("--filter", "filter_", default="", metavar="REGEX", help="Matching instance ids.")
@click.option("--shuffle", is_flag=True, help="Refused.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Folder for preds.json and ID/ID.traj.json, written at the end.")  # fmt: skip
@click.option("-w", "--workers", type=click.IntRange(1, 2000), default=1, metavar="N",
              show_default=True, help="Rollouts in flight.")  # fmt: skip
@click.option("-m", "--model", metavar="M", help="openai/NAME, anthropic/NAME, hosted_vllm/NAME.")
@click.option("--model-class", metavar="C", help="Only litellm.")
@click.option("--redo-existing", is_flag=True, help="Start a new run.")
@click.option("-c", "--config", multiple=True, metavar="FILE|KEY=VALUE", help="YAML of mini-extra.")
@click.option("--environment-class", metavar="C", help="docker, podman, singularity, bubblewrap.")
@click.argument("more", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF PERDURE EVAL]")
def swebench(
    *, output: Path | None, redo_existing: bool, more: tuple[str, ...], **given: object
) -> None:
    """Run `mini-extra swebench` of mini-swe-agent 2.x as a Perdure run.

    The command first prints the equivalent `perdure eval`. It names each option that Perdure
    refuses. Other long options are those of `perdure eval`, such as --dry-run.

    \b
    perdure swebench --model openai/gpt-5-nano --subset verified --split test \\
        --workers 128 --output DIR
    """
    import asyncio

    from perdure.cli.commands.eval import evaluate
    from perdure.cli.commands.run_options import follow, read
    from perdure.cli.console import say
    from perdure.cli.runs import mini_swe_agent_files, mini_swe_agent_options, run_launcher
    from perdure.settings import process_environment
    from perdure.settings.settings_loader import load_settings

    found = mini_swe_agent_options.translate(**given)  # type: ignore[arg-type]  # click checked them
    found.options += ["--new"] * redo_existing + [*more]
    mini_swe_agent_options.name_endpoint(found, load_settings())
    for note in found.notes:
        say(f"note: {note}")
    say(found.text)
    process_environment.force(found.variables)
    context = evaluate.make_context("perdure eval", found.argv)
    settings, asked, launch = read(**context.params)
    planned = asyncio.run(run_launcher.plan(settings, asked, dry_run=launch.dry_run))
    if output is not None and not planned.joins and not redo_existing:
        mini_swe_agent_files.check_unused(output)
    code = follow(settings, planned, launch, reports=True)
    if output is not None and launch.wait and not launch.dry_run:
        code |= asyncio.run(mini_swe_agent_files.write(settings, planned.request.run_id, output))
    if code:
        raise click.exceptions.Exit(code)
