"""`perdure export`: writes a run's episodes as one file, for trainers, graders and spreadsheets."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perdure.cli.commands import completion
from perdure.cli.console import answer, json_option
from perdure.settings.settings_loader import load_settings

if TYPE_CHECKING:
    from perdure.episodes.trajectory_segments import RewardShare, SegmentMode

SUFFIXES = {
    "preds": "json",
    "preds-all": "jsonl",
    "episodes": "parquet",
    "jsonl": "jsonl",
    "atif": "jsonl",
    "sft": "jsonl",
    "sft-tokens": "jsonl",
    "preferences": "jsonl",
    "slime": "jsonl",
    "skyrl": "jsonl",
    "torchtitan": "jsonl",
    "verl": "jsonl",
    "dataset": "dataset",
}
COUNTED = {
    "exposed": "exposed",
    "with_signals": "with signals",
    "withheld_rewards": "with a withheld reward",
}
"""Counts of an export -> how its last line names them."""


@click.command()
@click.argument("run_id", metavar="RUN", shell_complete=completion.runs)
@click.option(
    *("--format", "-f", "format_name"),
    type=click.Choice(list(SUFFIXES)),
    default="preds",
    metavar="F",
    show_default=True,
    help="One of the formats above.",
)
@click.option(
    *("--out", "-o", "out"),
    type=click.Path(path_type=Path),
    help="File to write; - is standard output.  [default: RUN.FORMAT.SUFFIX here]",
)
@click.option(
    "--segments",
    "mode",
    type=click.Choice(["tree", "merge_turns", "slime"]),
    default="tree",
    show_default=True,
    help="How to cut segments: by recorded token ids (tree), or as slime's coding-agent example"
    " (merge_turns) or its message tree (slime) does.",
)
@click.option(
    "--reward-share",
    type=click.Choice(["full", "split", "last"]),
    default="full",
    show_default=True,
    help="Reward of each of K segments: the full reward, 1/K of it, or all of it for the last segment.",
)
@click.option("--keep-unused", is_flag=True, help="Also train answers that the agent did not use.")
@click.option(
    "--best",
    type=click.IntRange(min=1),
    metavar="N",
    help="For sft: at most N rollouts per instance, those with the highest reward.",
)
@click.option(
    "--min-reward",
    type=float,
    metavar="R",
    help="For sft: only rollouts with at least this reward.",
)
@click.option(
    "--push",
    metavar="OWNER/NAME",
    help="For dataset: upload the folder to the hub, private if it is new.",
)
@json_option
def export(
    *,
    run_id: str,
    format_name: str,
    out: Path | None,
    mode: "SegmentMode",
    reward_share: "RewardShare",
    keep_unused: bool,
    best: int | None,
    min_reward: float | None,
    push: str | None,
    as_json: bool,
) -> None:
    """Write a run's episodes as one file.

    \b
    preds      predictions for the SWE-bench harness, one patch per instance
    preds-all  the same entries for every graded sample
    episodes   token arrays: one parquet file, one row per segment
    jsonl      the readable episodes, one line per rollout
    atif       Harbor's trajectories (ATIF-v1.7), one line per rollout
    sft        messages, tools and reward, one line per conversation
    sft-tokens the same as recorded ids, labels and masks, one row per segment
    preferences
               a better and a worse rollout of one instance, one line per pair
    dataset    a folder with a card, for load_dataset and the Hugging Face hub
    slime, skyrl, torchtitan, verl
               that trainer's own fields; arrays if --out is a .parquet

    stderr names each rollout that is left out. Exit code 1: there is nothing to write, or files of
    a rollout are lost or unreadable. The other rollouts are written.
    """
    settings = load_settings()
    from perdure.episodes import hub_dataset
    from perdure.episodes.demonstrations.rejection_sampling import Selection
    from perdure.episodes.output_file import is_standard_output
    from perdure.episodes.run_export import Rules, export_run
    from perdure.rollouts.run_label import check_not_deleting
    from perdure.storage.store_url import store_to_read

    suffix = SUFFIXES[format_name]
    name = run_id if format_name == suffix else f"{run_id}.{format_name}"
    path = out or Path(f"{name}.{suffix}")
    rules = Rules(mode, reward_share, Selection(best, min_reward), keep_unused)
    store = store_to_read(settings)
    asyncio.run(check_not_deleting(store, run_id))
    if push and format_name != "dataset":
        raise click.UsageError("--push needs -f dataset")
    if format_name == "dataset":
        report = asyncio.run(hub_dataset.write_folder(store, run_id, path))
    else:
        report = asyncio.run(export_run(store, run_id, format_name, path, rules))  # type: ignore[arg-type]  # click checked the choice
    if push and report.written:
        click.echo(f"pushed to {hub_dataset.push(path, push)}", err=True)
    for one in report.omitted:
        sample = "" if one.sample_index is None else f" #{one.sample_index}"
        head = "error: left out" if one.damaged else "left out "
        click.echo(f"{head} {one.instance_id}{sample}: {one.reason}", err=True)
    if as_json:
        omitted = [asdict(one) for one in report.omitted]
        written = {"path": str(path), "format": format_name, "written": report.written}
        counts = {name: getattr(report, name) for name in COUNTED}
        answer({**written, **counts, "omitted": omitted}, err=is_standard_output(path))
    elif report.written:
        counted = [f"{n} {told}" for name, told in COUNTED.items() if (n := getattr(report, name))]
        audit = f"; in the run: {', '.join(counted)}" if counted else ""
        click.echo(f"{report.written} written to {path}{audit}", err=is_standard_output(path))
    else:
        kept = f"; {path} is from an earlier export" if path.exists() else ""
        click.echo(f"error: nothing written: every rollout was left out{kept}", err=True)
    if not report.written or any(one.damaged for one in report.omitted):
        raise click.exceptions.Exit(1)
