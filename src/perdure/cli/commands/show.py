"""`perdure show`: shows one rollout, read from its files in the store."""

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click

from perdure.cli.console import answer, json_option, many, only_one_of
from perdure.cli.rollouts.current_activity import current_step
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_lifecycle

if TYPE_CHECKING:
    from perdure.reports.stored_rollout import StoredAttempt, StoredRollout
    from perdure.storage.base import Store
    from perdure.types import ModelScore, NetworkRecord

PATCH_LINES = 40
TESTS_SHOWN = 20
HOSTS_SHOWN = 10
ANSWER_SHOWN = 200


@click.command()
@click.argument("rollout")
@click.option("--patch", is_flag=True, help="Print only the captured diff, byte for byte.")
@click.option("--log", is_flag=True, help="Print only the hidden tests' output, byte for byte.")
@click.option("--artifacts", is_flag=True, help="Print only the tar of kept files and folders.")
@click.option("--turns", is_flag=True, help="Show chains, turns, and which tokens are trained.")
@click.option(
    "--attempt",
    type=click.IntRange(1),
    metavar="N",
    help="With --turns: this attempt instead of the last.",
)
@click.option("--full", is_flag=True, help="With --turns: all texts in full.")
@json_option
def show(
    *,
    rollout: str,
    patch: bool,
    log: bool,
    artifacts: bool,
    turns: bool,
    attempt: int | None,
    full: bool,
    as_json: bool,
) -> None:
    """Show one rollout: stages, attempts, grade, patch, turns.

    ROLLOUT is a workflow id (rollout/RUN/INSTANCE/SAMPLE), RUN/INSTANCE[/SAMPLE], or the beginning
    of an instance id. Exit code 1: one of its files is unreadable; stderr names the file.
    """
    parts = {"patch": patch, "log": log, "artifacts": artifacts}
    only_one_of(**parts, turns=turns)
    only_one_of(**parts, json=as_json)
    part = next((name for name, is_wanted in parts.items() if is_wanted), "")
    if (attempt or full) and not turns:
        raise click.UsageError(f"{'--attempt' if attempt else '--full'} needs --turns")
    settings = load_settings()
    from perdure.errors import NotFound
    from perdure.reports import stored_rollout
    from perdure.storage.store_url import store_to_read

    async def work() -> bool:
        store = store_to_read(settings)
        try:
            found = await stored_rollout.read(store, await stored_rollout.find(store, rollout))
        except stored_rollout.Ambiguous:
            raise
        except NotFound:
            if part or turns or not await _show_open(settings, rollout, as_json):
                raise
            return False
        for line in found.damaged:
            click.echo(f"error: {line}", err=True)
        if part:
            sys.stdout.buffer.write(await _raw(store, found, part))
        elif turns:
            await _turns(settings, store, found, attempt=attempt, full=full, as_json=as_json)
        elif as_json:
            answer(await _document(settings, store, found))
        else:
            await _print(settings, store, found)
        return bool(found.damaged)

    if asyncio.run(work()):
        raise click.exceptions.Exit(1)


async def _turns(
    settings: Settings,
    store: "Store",
    found: "StoredRollout",
    *,
    attempt: int | None,
    full: bool,
    as_json: bool,
) -> None:
    from perdure.cli.rollouts import turn_listing as show_turns
    from perdure.reports import readable_trajectory

    turns = await readable_trajectory.read(store, found, attempt)
    if as_json:
        answer(readable_trajectory.document(found, turns))
    else:
        show_turns.show(found, turns, full=full)


async def _raw(store: "Store", found: "StoredRollout", part: str) -> bytes:
    from perdure.errors import NotFound

    last = found.last
    key = ""
    if last is not None and part == "patch" and last.patch:
        key = last.patch["key"]
    if last is not None and part == "log" and last.grade and last.grade.log_key:
        key = last.grade.log_key
    if last is not None and part == "artifacts":
        key = next((one for one in last.evidence if one.endswith("/artifacts.tar")), "")
    if not key:
        what = "test log" if part == "log" else part
        raise NotFound(f"{found.name} has no {what} (yet)")
    return (await store.get(key)).data


async def _document(settings: Settings, store: "Store", found: "StoredRollout") -> dict[str, Any]:
    at = "" if found.episode else await current_step(settings, found.name.workflow_id)
    return {
        "rollout": found.name.workflow_id,
        "folder": f"{store.url}/{found.name.prefix}",
        "running": at or None,
        "episode": found.episode,
        "attempts": [
            {
                "attempt": one.number,
                "sandbox": one.sandbox,
                "agent": one.agent,
                "patch": one.patch,
                "grade": one.grade.model_dump(mode="json") if one.grade else None,
                "networks": {name: record.model_dump() for name, record in one.networks.items()},
                "evidence": list(one.evidence),
            }
            for one in found.attempts
        ],
        "damaged": list(found.damaged),
    }


async def _print(settings: Settings, store: "Store", found: "StoredRollout") -> None:
    click.secho(str(found.name), bold=True)
    open_at = found.episode is None and await current_step(settings, found.name.workflow_id)
    for label, value in [("status", f"running: {open_at}")] if open_at else _ending(found):
        click.echo(f"{label:<10}{value}")
    for attempt in found.attempts:
        click.echo(f"attempt {attempt.number} {_steps(attempt)}")
    await _print_tests(found)
    await _print_patch(store, found)
    click.echo(f"\n{'Folder':<10}{store.url}/{found.name.prefix}")
    state = stack_lifecycle.running(settings)
    if state is not None and state.ui_url:
        from urllib.parse import quote

        page = quote(found.name.workflow_id, safe="")
        click.echo(f"{'Web UI':<10}{state.ui_url}/namespaces/{state.namespace}/workflows/{page}")


async def _show_open(settings: Settings, rollout: str, as_json: bool) -> bool:
    """Show a running rollout that has no files in the store yet. False: there is no such rollout."""
    from perdure.reports.stored_rollout import named

    name = named(rollout)
    line = await current_step(settings, name.workflow_id) if name is not None else ""
    if name is None or not line:
        return False
    if as_json:
        answer({"rollout": name.workflow_id, "episode": None, "attempts": [], "running": line})
    else:
        click.secho(str(name), bold=True)
        click.echo(f"status    running: {line}")
    return True


def _ending(found: "StoredRollout") -> list[tuple[str, str]]:
    episode = found.episode
    if episode is None and any("/episode.json is unreadable" in line for line in found.damaged):
        return [("status", "unknown: its episode is unreadable")]
    if episode is None:
        return [("status", "running, or never finished: see `perdure status`")]
    outcome = episode.get("outcome")
    lines = [("status", f"{episode.get('status')}{f', {outcome}' if outcome else ''}")]
    reward = episode.get("reward")
    withheld = (episode.get("grade") or {}).get("withheld", "")
    why = f", withheld: {withheld}" if withheld and outcome else ""
    lines.append(("reward", "none" + why if reward is None else f"{reward:g}"))
    if too_stale := episode.get("too_stale"):
        lines.append(("untrained", f"too stale: {too_stale}"))
    if adopted := episode.get("adopted"):
        verdict = adopted["reward"]
        gave = "" if verdict is None else f": {adopted['score']} {verdict:g}"
        lines.append(("adopted", f"{adopted['origin']}, {adopted['file']}{gave}"))
    if named := episode["named_rewards"]:
        lines.append(("rewards", ", ".join(f"{name} {value:g}" for name, value in named.items())))
    lines.append(("model", ", ".join(episode["models"]) or "none was called"))
    if stray := episode["trajectory"]["untrained_turns"].get("stray"):
        lines.append(("stray", f"{many(stray, 'call')} that the agent did not make; not trained"))
    failure = episode.get("failure")
    if failure and episode.get("status") == "truncated":
        lines.append(("stopped", failure["message"]))
    elif failure:
        where = f"{failure['boundary']} ({failure['type']})"
        lines.append(("failed at", f"{where}: {failure['message']}"))
    for one in episode.get("earlier", ()):
        ended = one.get("outcome") or one["status"]
        lines.append(("earlier", f"{ended} in attempt {one['attempt']}: {one['key']}"))
    lines += [("damaged", line) for line in episode["damaged"]]
    return lines


def _steps(attempt: "StoredAttempt") -> str:
    from perdure.cli.calibration_labels import label_grade

    steps = []
    if attempt.sandbox:
        host = f"{attempt.sandbox['provider']} on {attempt.sandbox['host']}"
        steps.append(f"boot {attempt.sandbox['seconds']:.2f} s ({host})")
    if attempt.agent:
        detail = f": {attempt.agent['detail']}" if attempt.agent.get("detail") else ""
        turns, tokens = attempt.agent.get("turns", 0), attempt.agent.get("tokens", 0)
        counts = f"{many(turns, 'turn')}, {many(tokens, 'token')}"
        steps.append(
            f"agent {attempt.agent['end']}{detail} in {attempt.agent['seconds']:.1f} s ({counts})"
        )
    if attempt.patch:
        size, files = many(attempt.patch["size"], "byte"), many(attempt.patch["files"], "file")
        steps.append(f"patch {size}, {files}")
        if kept := attempt.patch.get("artifacts_size"):
            steps.append(f"artifacts {many(kept, 'byte')} (--artifacts prints the tar)")
    if attempt.grade:
        grade = attempt.grade
        reason = f" ({grade.reason})" if grade.reason else ""
        twins = ""
        if grade.verification:
            why = f": {grade.verification.reason}" if grade.verification.reason else ""
            twins = f", officially {grade.official}; {grade.verification.state}{why}"
        marked = f"; {mark}" if (mark := label_grade(grade)) else ""
        steps.append(f"grade {grade.outcome.value}{reason} in {grade.seconds:.1f} s{twins}{marked}")
        steps += [f"signal {signal}" for signal in grade.signals]
        if (score := grade.model_score) is not None:
            steps.append(_score(score))
    steps += [line for name, one in attempt.networks.items() for line in _refused(name, one)]
    return "\n          ".join(steps) or "no files"


def _refused(sandbox: str, record: "NetworkRecord") -> list[str]:
    shown = record.refused[:HOSTS_SHOWN]
    lines = [
        f"network {sandbox}: {one.host}:{one.port} {one.reason} ({many(one.count, 'request')})"
        for one in shown
    ]
    hidden = sum(one.count for one in record.refused[HOSTS_SHOWN:]) + record.more
    return [*lines, *([f"network {sandbox}: {many(hidden, 'request')} more"] if hidden else [])]


def _score(score: "ModelScore") -> str:
    from perdure.cli.rollouts.turn_listing import printable

    tokens = ""
    if score.sampled_tokens:
        counts = f"{many(score.prompt_tokens, 'prompt token')}, {score.sampled_tokens:,} sampled"
        tokens = f", {many(score.calls, 'call')}, {counts}"
    answer = printable(" ".join(score.answer.split()))
    shown = f"{answer[:ANSWER_SHOWN]} ..." if len(answer) > ANSWER_SHOWN else answer
    return f"{score.model} scores {score.reward:g} in {score.seconds:.1f} s{tokens}: {shown}"


async def _print_tests(found: "StoredRollout") -> None:
    failing = found.failing_tests()
    if failing:
        tests = many(len(failing), "test")
        click.echo(f"\n{tests} that should pass did not (--log prints all output):")
        for line in failing[:TESTS_SHOWN]:
            click.echo(f"  {line}")
        if len(failing) > TESTS_SHOWN:
            click.echo(f"  ... and {len(failing) - TESTS_SHOWN} more")


async def _print_patch(store: "Store", found: "StoredRollout") -> None:
    if found.last is None or not found.last.patch or found.last.patch["empty"]:
        return
    text = (await _raw(store, found, "patch")).decode("utf-8", "replace").splitlines()
    click.echo(f"\nPatch, {many(len(text), 'line')} (--patch prints it byte for byte):")
    for line in text[:PATCH_LINES]:
        colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
        click.secho(f"  {line}", fg=colour)
    if len(text) > PATCH_LINES:
        click.echo(f"  ... {len(text) - PATCH_LINES} more lines")
