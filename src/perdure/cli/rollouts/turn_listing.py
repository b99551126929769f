"""`perdure show ROLLOUT --turns`: prints a trajectory by chain and turn, without token ids."""

import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

import click

from perdure.cli.console import many
from perdure.reports.readable_trajectory import Trajectory, chain_title, document, facts
from perdure.reports.stored_rollout import StoredRollout

PIPED_COLUMNS = 160
ROLE_WIDTH = 8
STYLES = {"thinks": "bright_black", "says": "green", "calls": "yellow", "result": "cyan"}


def show(rollout: StoredRollout, found: Trajectory, *, full: bool) -> None:
    """Print the chains as a tree: main first, each sub-agent under the chain that started it."""
    shown = document(rollout, found)
    _Printer(shown, full=full).everything()
    if not full:
        click.secho("\n--full prints every text in full, --json all data.", dim=True)


class _Printer:
    def __init__(self, shown: dict[str, Any], *, full: bool) -> None:
        self.shown = shown
        self.full = full
        self.width = shutil.get_terminal_size((PIPED_COLUMNS, 24)).columns
        self.segments = {one["index"]: one for one in shown["segments"]}
        self.chains: dict[str, list[dict[str, Any]]] = {}
        for turn in shown["turns"]:
            self.chains.setdefault(turn["chain"], []).append(turn)

    def everything(self) -> None:
        self._head()
        shown: set[str] = set()
        for chain in self.chains:
            parent = self.chains[chain][0]["parent_chain"]
            if parent not in self.chains or parent == chain:
                self._chain(chain, 0, shown)
        for chain in self.chains:  # chains that name each other as their parent
            self._chain(chain, 0, shown)

    def _head(self) -> None:
        counts, shown = self.shown["counts"], self.shown
        state = "" if shown["source"] == "store" else ", still in the journal"
        click.secho(f"{shown['rollout'].removeprefix('rollout/')}", bold=True)
        click.echo(
            f"attempt {shown['attempt']}{state}: {many(len(shown['turns']), 'turn')} in "
            f"{many(counts['chains'], 'chain')}, {many(counts['compactions'], 'compaction')}"
        )
        left = ", ".join(f"{n} {reason}" for reason, n in counts["untrained_tokens"].items())
        click.echo(
            f"{counts['sampled_tokens']} tokens sampled, {counts['trained_tokens']} trained in "
            f"{many(len(self.segments), 'segment')}{f'; not trained: {left}' if left else ''}"
        )
        if counts["replayed_turns"]:
            fresh = counts["replay_ended_at"]
            ended = "to the end" if fresh is None else f"until turn {fresh}"
            click.echo(f"{many(counts['replayed_turns'], 'turn')} replayed {ended}")

    def _chain(self, chain: str, depth: int, shown: set[str]) -> None:
        if chain in shown:
            return
        shown.add(chain)
        turns = self.chains[chain]
        indent = "  " * depth
        of = self._started(turns[0])
        click.secho(f"\n{indent}━━ {chain_title(turns[0])}{of}", bold=True)
        segment: int | None = None
        for position, turn in enumerate(turns):
            if position == 0 or turn["segment"] != segment:
                self._cut(turn, indent, first=position == 0)
            segment = turn["segment"]
            self._turn(turn, indent)
        for other, its in self.chains.items():
            if its[0]["parent_chain"] == chain:
                self._chain(other, depth + 1, shown)

    def _started(self, first: dict[str, Any]) -> str:
        parent = self.chains.get(first["parent_chain"], [])
        before = [turn["index"] for turn in parent if turn["index"] < first["index"]]
        after = f" after turn {before[-1]}" if before else ""
        return f", started by {first['parent_chain']}{after}" if first["parent_chain"] else ""

    def _cut(self, turn: dict[str, Any], indent: str, *, first: bool) -> None:
        """Print the start of a segment, and why the previous one ended."""
        segment = self.segments.get(turn["segment"])
        if segment is None:
            return
        branch = f"branches off after turn {turn['parent']}"
        why = "" if first else f" (new: {turn['bridge_miss'] or branch})"
        click.secho(
            f"{indent}┌ segment {segment['index']} {segment['kind']}{why}: "
            f"prompt {segment['prompt_tokens']}, response {segment['response_tokens']}, "
            f"trained {segment['trained_tokens']}, {segment['reward_share']:.3g} of the reward",
            fg="magenta",
        )

    def _turn(self, turn: dict[str, Any], indent: str) -> None:
        click.secho(f"{indent}{turn['index']:>3}  ", bold=True, nl=False)
        click.echo(f"{facts(turn)}  ", nl=False)
        trained = turn["untrained"] is None
        mark = "trained" if trained else f"not trained: {turn['untrained']}"
        click.secho(mark, fg=None if trained else "red")
        for label, text in _messages(turn):
            self._text(label, text, indent)

    def _text(self, label: str, text: str, indent: str) -> None:
        margin = f"{indent}     {label:<{ROLE_WIDTH}} "
        room = max(20, self.width - len(margin))
        if self.full:
            body = textwrap.indent(printable(text), " " * len(margin)).lstrip(" ")
        else:
            body = _short(printable(text), room)
        click.echo(f"{indent}     ", nl=False)
        click.secho(f"{label:<{ROLE_WIDTH}} ", fg=STYLES.get(label), nl=False)
        click.secho(body, dim=label in ("system", "thinks"))


def _messages(turn: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The messages since the parent turn and the answer, each with a label."""
    for message in turn["new_messages"]:
        label = "result" if message.get("role") == "tool" else str(message.get("role", "?"))
        yield label, str(message.get("content") or "")
        yield from _calls(message)
    answer = turn["answer"]
    if answer.get("reasoning_content"):
        yield "thinks", answer["reasoning_content"]
    if answer.get("content"):
        yield "says", answer["content"]
    yield from _calls(answer)


def _calls(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        yield "calls", f"{function.get('name')} {function.get('arguments')}"


def printable(text: str) -> str:
    """Replace control characters: text from a model or a tool must not control the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def _short(text: str, room: int) -> str:
    """One line: each line end becomes ⏎. If the text is cut, its length follows."""
    line = " ⏎ ".join(part for part in text.strip().splitlines() if part.strip())
    if len(line) <= room:
        return line
    left = f" … {len(text)} characters"
    return line[: max(0, room - len(left))] + left
