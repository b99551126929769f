"""Exports a finished run for other programs: predictions, token arrays, JSON lines, messages.

A rollout that cannot be exported exactly is never changed to fit: it is omitted and listed with the
reason.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from perdure.episodes import turns_parquet
from perdure.episodes.atif import trajectory
from perdure.episodes.demonstrations.demonstration_messages import conversations, has_text
from perdure.episodes.demonstrations.preference_pairs import pairs, preference
from perdure.episodes.demonstrations.rejection_sampling import EVERYTHING, Selection
from perdure.episodes.episode import Episode, EpisodeSegments
from perdure.episodes.episode_parquet import TOKENS_SCHEMA, with_all_columns
from perdure.episodes.episode_store import read_segments, scan_run
from perdure.episodes.output_file import output_file
from perdure.episodes.trainer_files import REPLAY_FORMATS, TrainerFile, TrainerFormat
from perdure.episodes.trajectory_segments import RewardShare, SegmentMode
from perdure.errors import ConfigurationError, NotFound
from perdure.storage import stored_json
from perdure.storage.base import Store
from perdure.types import Turn

Format = (
    Literal["preds", "preds-all", "episodes", "jsonl", "atif", "sft", "preferences"] | TrainerFormat
)
"""preds      predictions for the SWE-bench harness: one JSON object, one patch per instance
preds-all  the same entries for every graded or ungraded sample, one JSON line each
episodes   token arrays: one parquet file, one row per segment
jsonl      the readable episodes, one JSON line per rollout
atif       Harbor's trajectories with sub-agents inside, one JSON line per rollout
sft        the messages and tools of each conversation of a graded rollout, one JSON line each
sft-tokens the same as recorded ids: `input_ids`, `labels`, `assistant_masks`, one row per segment
preferences
           a better and a worse rollout of one instance: messages, ids, masks, one JSON line per pair
slime, skyrl, torchtitan, verl
           that trainer's own fields: JSON lines, or parquet if the file ends in .parquet"""
SELECTING = ("sft", "sft-tokens")
"""Formats that allow a `Selection`. In others, a reward's baseline needs all rollouts."""
FORMATS: tuple[str, ...] = tuple(name for part in get_args(Format) for name in get_args(part))


@dataclass(frozen=True)
class Rules:
    """How segments are cut and rewarded for a trainer's format, and which rollouts SFT selects."""

    mode: SegmentMode = "tree"
    reward_share: RewardShare = "full"
    selection: Selection = EVERYTHING
    keep_unused: bool = False
    """Include answers that the agent did not use."""


@dataclass(frozen=True)
class Omitted:
    """A rollout or instance that is not in the export, and why."""

    instance_id: str
    sample_index: int | None
    reason: str
    damaged: bool = False
    """Its data is missing or unreadable in the store. If False, the format cannot hold it."""


@dataclass(frozen=True)
class ExportReport:
    """The result of an export; `omitted` is empty if it is complete."""

    format: Format
    path: Path
    written: int
    omitted: tuple[Omitted, ...] = field(default=())
    exposed: int = 0
    """Rollouts that a twin exposed. This count and the next two are of the whole run."""
    with_signals: int = 0
    withheld_rewards: int = 0


class _Left(Exception):
    """Why one rollout cannot be exported."""

    damaged = False


class _Nothing(Exception):
    """Every rollout is omitted."""


class _Damaged(_Left):
    """Data that should be in the store is missing or unreadable."""

    damaged = True


async def export_run(
    store: Store, run_id: str, format: Format, out: Path, rules: Rules | None = None
) -> ExportReport:
    """Write one file, whole or not at all. `rules` apply to the trainers' formats. If every rollout
    is omitted, it writes no file, and an earlier file stays.

    Raises: ConfigurationError for an unknown format or a selection that the format does not allow;
    NotFound when the run has no episodes.
    """
    _check(format, rules)
    episodes, unreadable = await scan_run(store, run_id)
    if not episodes and not unreadable:
        raise NotFound(
            f"run {run_id!r} has no episodes in {store.url}: `perdure status` lists the runs"
        )
    exporter = _Exporter(store, episodes, rules or Rules(), parquet=out.suffix == ".parquet")
    exporter.omitted += [
        Omitted(one.instance_id, one.sample_index, str(one), damaged=True) for one in unreadable
    ]
    with contextlib.suppress(_Nothing), output_file(out) as file:
        await exporter.write(format, file)
        if not exporter.written:
            raise _Nothing
    return ExportReport(
        format,
        out,
        exporter.written,
        tuple(exporter.omitted),
        exposed=sum(one.verification == "exposed" for one in episodes),
        with_signals=sum(bool(one.signals) for one in episodes),
        withheld_rewards=sum(bool(one.withheld) for one in episodes),
    )


def _check(format: Format, rules: Rules | None) -> None:
    if format not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigurationError(f"unknown export format {format!r}: use one of {known}")
    if rules is not None and rules.selection != EVERYTHING and format not in SELECTING:
        raise ConfigurationError(
            f"--best and --min-reward work with {' and '.join(SELECTING)}, not with {format}"
        )
    if rules is not None and rules.reward_share != "full" and format not in get_args(TrainerFormat):
        trainers = ", ".join(get_args(TrainerFormat))
        raise ConfigurationError(f"--reward-share works with {trainers}, not with {format}")


class _Exporter:
    def __init__(
        self, store: Store, episodes: Sequence[Episode], rules: Rules, *, parquet: bool
    ) -> None:
        self.store = store
        self.rules = rules
        self.parquet = parquet
        self.episodes = episodes
        self.rejected = self.rules.selection.rejected(episodes)
        self.written = 0
        self.omitted: list[Omitted] = []

    async def write(self, format: Format, file: BinaryIO) -> None:
        if format == "preds":
            await self._preds(file)
        elif format == "episodes":
            await self._tokens(file)
        elif format == "preferences":
            await self._preferences(file)
        elif format in get_args(TrainerFormat):
            await self._trainer(TrainerFile(format, self.episodes, file, parquet=self.parquet))  # type: ignore[arg-type]  # just checked
        else:
            make: dict[str, Callable[[Episode], Any]] = {
                "preds-all": self._sample,
                "jsonl": self._as_is,
                "atif": self._trajectory,
                "sft": self._demonstrations,
            }
            async for _, made in self._each(self.episodes, make[format]):
                for line in made if isinstance(made, list) else [made]:
                    file.write(json.dumps(line).encode() + b"\n")

    async def _preds(self, file: BinaryIO) -> None:
        """One prediction per instance, from its first sample with a final patch."""
        predictions = {}
        chosen = list(self._first_patched())
        async for episode, prediction in self._each(chosen, self._prediction):
            predictions[episode.instance_id] = prediction
        file.write(json.dumps(predictions, indent=1).encode() + b"\n")

    def _first_patched(self) -> Iterator[Episode]:
        for instance_id, samples in groupby(self.episodes, key=lambda e: e.instance_id):
            tried = list(samples)
            patched = next((e for e in tried if e.has_final_patch), None)
            if patched is not None:
                yield patched
            else:
                ended = ", ".join(sorted({e.status.value for e in tried}))
                self.omitted.append(Omitted(instance_id, None, f"no graded sample ({ended})"))

    async def _preferences(self, file: BinaryIO) -> None:
        """One line per pair of a better and a worse rollout of one instance."""
        for instance_id, group in groupby(self.episodes, key=lambda e: e.instance_id):
            tried = list(group)
            matched = pairs(tried)
            if not matched:
                graded = sum(one.reward is not None for one in tried)
                reason = f"no two of its {graded} graded rollouts differ in reward"
                self.omitted.append(Omitted(instance_id, None, reason))
            for better, worse in matched:
                await self._pair(better, worse, file)

    async def _pair(self, better: Episode, worse: Episode, file: BinaryIO) -> None:
        read: dict[str, list[Turn]] = {}
        for one in (better, worse):
            try:
                read[one.rollout_id] = await self._recorded_turns(one)
            except _Left as left:
                return self._leave_out(one, left)
        line = preference(better, worse, read)
        if line is None:
            differs = _Left(f"its first prompt is not the same as in sample {better.sample_index}")
            return self._leave_out(worse, differs)
        self.written += 1
        file.write(json.dumps(line).encode() + b"\n")

    async def _tokens(self, file: BinaryIO) -> None:
        with pq.ParquetWriter(file, TOKENS_SCHEMA, compression="zstd") as writer:
            async for _, table in self._each(self.episodes, self._table):
                writer.write_table(table)

    async def _trainer(self, file: TrainerFile) -> None:
        async def make(episode: Episode) -> EpisodeSegments:
            if file.format in SELECTING:
                self._take(episode)
            replays = file.format in REPLAY_FORMATS
            kept = file.format == "slime"
            found = await self._segments(episode, routed_experts=replays, kept_tokens=kept)
            if (reason := file.why_not(found)) is not None:
                raise _Left(reason)
            return found

        async for _, found in self._each(self.episodes, make):
            file.add(found)
        file.close()

    async def _segments(
        self, episode: Episode, *, routed_experts: bool, kept_tokens: bool
    ) -> EpisodeSegments:
        rules = self.rules
        try:
            return await read_segments(
                self.store,
                episode,
                mode=rules.mode,
                reward_share=rules.reward_share,
                keep_unused=rules.keep_unused,
                routed_experts=routed_experts,
                kept_tokens=kept_tokens,
            )
        except NotFound:
            raise _Damaged(f"{episode.tokens_key} is missing from the store") from None
        except ValueError as error:
            raise _Damaged(str(error)) from error

    async def _each(
        self, episodes: Sequence[Episode], make: Callable[[Episode], Any]
    ) -> AsyncIterator[tuple[Episode, Any]]:
        for episode in episodes:
            try:
                made = await make(episode)
            except _Left as left:
                self._leave_out(episode, left)
                continue
            self.written += 1
            yield episode, made

    def _leave_out(self, episode: Episode, left: _Left) -> None:
        who = episode.instance_id, episode.sample_index
        self.omitted.append(Omitted(*who, str(left), left.damaged))

    # -- one rollout ---------------------------------------------------------------------------

    async def _prediction(self, episode: Episode) -> dict[str, str]:
        if not episode.has_final_patch:
            raise _Left(f"not graded ({episode.status.value})")
        return {
            "model_name_or_path": "-".join([episode.agent, *episode.models]),
            "instance_id": episode.instance_id,
            "model_patch": await self._patch(episode),
        }

    async def _sample(self, episode: Episode) -> dict[str, Any]:
        """A prediction with the sample's index, a field that the harness ignores."""
        return {**await self._prediction(episode), "sample_index": episode.sample_index}

    async def _patch(self, episode: Episode) -> str:
        if episode.patch is None:
            raise _Left("no patch was captured")
        data = await self._checked(episode.patch.key, episode.patch.sha256, episode.patch.empty)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _Left(
                f"its patch is not UTF-8 at byte {error.start}; read the bytes from "
                f"{self.store.url}/{episode.patch.key}"
            ) from error

    async def _checked(self, key: str, sha256: str, empty: bool = False) -> bytes:
        data = b"" if empty else await self._get(key)
        try:
            return data if empty else stored_json.check_file(key, data, sha256)
        except ValueError as error:
            raise _Damaged(str(error)) from error

    async def _table(self, episode: Episode) -> pa.Table:
        data = await self._checked(episode.tokens_key, episode.tokens_sha256)
        try:
            return with_all_columns(pq.read_table(pa.BufferReader(data)))
        except (pa.ArrowException, ValueError) as error:
            problem = str(error).splitlines()[0]
            raise _Damaged(f"{episode.tokens_key} is unreadable: {problem}") from error

    async def _as_is(self, episode: Episode) -> dict[str, Any]:
        return episode.model_dump(mode="json")

    async def _trajectory(self, episode: Episode) -> dict[str, Any]:
        return trajectory(episode, await self._recorded_turns(episode))

    async def _demonstrations(self, episode: Episode) -> list[dict[str, Any]]:
        """Its conversations as text; the format `sft-tokens` has the exact ids."""
        self._take(episode)
        return [
            {
                "instance_id": episode.instance_id,
                "sample_index": episode.sample_index,
                "reward": episode.reward,
                "outcome": episode.outcome and episode.outcome.value,
                **episode.audit(),
                "chain": one.chain,
                "messages": one.messages(),
                "tools": one.tools(),
            }
            for one in conversations(await self._recorded_turns(episode))
        ]

    def _take(self, episode: Episode) -> None:
        """Raises: _Left for a rollout that is not a demonstration."""
        if why := episode.why_no_reward:
            raise _Left(why)
        if episode.rollout_id in self.rejected:
            raise _Left(self.rejected[episode.rollout_id])

    async def _recorded_turns(self, episode: Episode) -> list[Turn]:
        """Its turns with their texts, at least one. Raises: _Left."""
        if episode.turns_key is None:
            raise _Left(f"agent {episode.agent} called no model")
        try:
            turns = turns_parquet.decode(
                await self._checked(episode.turns_key, episode.turns_sha256)
            )
        except ValueError as error:
            raise _Damaged(f"{episode.turns_key} is unreadable: {error}") from error
        if not turns or not has_text(turns):
            raise _Left("its turns were recorded without texts" if turns else "it has no turns")
        return turns

    async def _get(self, key: str) -> bytes:
        try:
            return (await self.store.get(key)).data
        except NotFound:
            raise _Damaged(f"{key} is missing from the store") from None
