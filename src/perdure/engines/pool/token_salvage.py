"""The tokens that a turn has so far: for each, the engine and the policy version that sampled it, the
experts that it was routed to, and the tokens that top-p kept."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy
import structlog

from perdure.types import EngineSpan, ExpertRows, VersionSpan
from perdure.types.routed_experts import are_experts

NOT_RESUMABLE: Mapping[str, tuple[Any, ...]] = {
    "stop": ([], ()),
    "min_tokens": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "structured_outputs": (),
    "logit_bias": ({},),
}
"""Sampling fields that depend on the tokens sampled so far, with the values that turn them off. If one
is in use, a broken completion restarts, because an engine would count salvaged tokens as prompt."""

log = structlog.get_logger()


@dataclass
class Salvage:
    """A growing completion that outlives the engines that sample it. Shapes: ids, logprobs [C].

    Example:
        salvage.begin("vllm 10.0.0.7:8000", generation=17, version=3)
        salvage.add([5, 6], [-0.1, -0.2], version=3)
        salvage.report([VersionSpan(version=3, start=0, end=2)])   # engines send these at the end
    """

    ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    _kept: "list[array[int] | None]" = field(default_factory=list)
    """The kept set of each token; None where the engine returned none."""
    _parts: list[tuple[str, int, int]] = field(default_factory=list)
    """Name and generation of each engine, and the index of its first token."""
    _versions: list[int | None] = field(default_factory=list)
    _engine: tuple[str, int] = ("", 0)
    _begun: int = 0
    _loaded: int | None = None
    """The version known to be loaded when the newest tokens arrived, or when the call began."""
    _doubted: int | None = None
    _coming: int | None = None
    told: int | None = None
    """The version that the current engine reported for its newest token."""
    preemptions: int | None = None
    """How often the engines preempted the call; None if none of them told."""
    prompt_rows: int = 0
    """How many positions of the prompt, without its last token, have no recorded experts yet."""
    _experts: ExpertRows | None = None
    """Shape [N, layers, top_k]: `prompt_rows` rows, then for each sampled token the row that
    decided it."""
    _rows_before: int = 0
    """How many rows there were when the current engine began."""
    _reread_spans: list[tuple[int, int]] = field(default_factory=list)
    """Spans of tokens whose engine was lost before it returned their experts. The next engine read
    them as part of its prompt."""

    def begin(self, engine: str, generation: int, version: int | None = None) -> None:
        """Note that the next tokens come from this engine. `version`: the policy version known to be
        loaded now."""
        self._engine, self._begun = (engine, generation), len(self.ids)
        self._loaded, self.told = version, None
        self._rows_before = self.rows

    def add(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        version: int | None,
        kept: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Add tokens that arrived together. `version`: the policy version known to be loaded now.
        `kept`: each token's kept set. If a set is missing or lacks its token, all are ignored.

        The engine may have buffered all tokens but the last. So if the version has changed since the
        previous tokens, the version of these is unknown.
        Raises: ValueError, TypeError, OverflowError; then no token is added.
        """
        if not ids:
            return
        new_ids, new_logprobs = array("i", ids), array("d", logprobs)
        if len(new_ids) != len(new_logprobs) or min(new_ids) < 0:
            raise ValueError(f"{len(new_logprobs)} logprobs for the sampled tokens {list(ids)[:9]}")
        new_kept = _kept_sets(new_ids, kept)
        start = len(self.ids)
        self.ids.extend(new_ids)
        self.logprobs.extend(new_logprobs)
        self._kept.extend(new_kept)
        held = version if version == self._loaded else None
        self._versions += [held] * (len(ids) - 1) + [version]
        self._loaded = version
        if start <= self._begun or not self._parts:
            self._parts.append((*self._engine, start))

    def report(self, spans: Sequence[VersionSpan]) -> None:
        """Note the versions that the engine reports for its tokens. Spans count from its first token."""
        for span in spans:
            self.told = span.version
            at = slice(self._begun + span.start, self._begun + span.end)
            self._versions[at] = [span.version] * (span.end - span.start)

    def add_preemptions(self, count: int | None) -> None:
        if count is not None:
            self.preemptions = (self.preemptions or 0) + count

    def add_experts(self, rows: ExpertRows, expected: int) -> None:
        """Add the experts that the current engine returned, starting at the first position without
        any. An array that cannot be the experts of `expected` positions is ignored."""
        if len(rows) != expected or not are_experts(rows):
            log.warning(
                "ignored experts that do not fit their tokens", shape=rows.shape, expected=expected
            )
            return
        if (lost := max(0, self.rows - self.prompt_rows)) < self._begun:
            self._reread_spans.append((lost, self._begun))
        held = [rows] if self._experts is None else [self._experts, rows]
        if held[0].shape[1:] == rows.shape[1:]:
            self._experts = numpy.concatenate(held)

    def cut(self, length: int = 0) -> None:
        """Keep the first `length` tokens and drop the rest, with the experts that decided them."""
        del self.ids[length:], self.logprobs[length:], self._versions[length:]
        del self._kept[length:]
        self._parts = [part for part in self._parts if part[2] < length]
        if self._experts is not None:
            none_new = length <= self._begun
            most = self.prompt_rows + length
            self._experts = self._experts[: min(most, self._rows_before) if none_new else most]
            self._reread_spans = [
                one for one in self._reread_spans if one[1] <= self.rows - self.prompt_rows
            ]

    def cut_part(self) -> None:
        """Drop the current engine's tokens."""
        self.cut(min(self._begun, len(self.ids)))

    def doubt(self, coming: int | None) -> None:
        """Note that an update to version `coming` begins, so that the next tokens are unproven."""
        if self._doubted is None:
            self._doubted, self._coming = len(self.ids), coming

    def trust(self) -> None:
        """Note that the new weights are proven."""
        self._doubted = None

    def distrust(self) -> None:
        """Drop every token that new weights may have sampled, because they are wrong or unproven."""
        self.cut(self.sure)
        self._doubted = None

    @property
    def sure(self) -> int:
        """How many leading tokens come from proven weights: those before the update, and those that the
        engine reported with an older version."""
        if self._doubted is None:
            return len(self.ids)
        unsure = (None, self._coming)
        later = enumerate(self._versions[self._doubted :], self._doubted)
        return next((i for i, version in later if version in unsure), len(self.ids))

    @property
    def rows(self) -> int:
        """How many positions after the recorded ones have experts."""
        return 0 if self._experts is None else len(self._experts)

    @property
    def experts(self) -> ExpertRows | None:
        """The experts of all positions except the last. None if some are missing, or if new weights
        read tokens again that a lost engine had sampled, because those weights chose other
        experts."""
        if self.rows != self.prompt_rows + len(self.ids):
            return None
        versions = self._versions
        same = all({*versions[a:b]} == {*versions[b : b + 1]} for a, b in self._reread_spans)
        return self._experts if same else None

    @property
    def kept(self) -> "list[array[int]] | None":
        """The kept set of each token; None if some are missing."""
        known = [one for one in self._kept if one is not None]
        return known if known and len(known) == len(self.ids) else None

    @property
    def part(self) -> int:
        """How many tokens the current engine sampled."""
        return len(self.ids) - self._begun

    @property
    def engines(self) -> list[EngineSpan]:
        """Which engine sampled which tokens."""
        starts = [start for _, _, start in self._parts]
        return [
            EngineSpan(engine=engine, generation=generation, start=start, end=end)
            for (engine, generation, start), end in zip(
                self._parts, [*starts[1:], len(self.ids)], strict=False
            )
        ]

    @property
    def versions(self) -> list[VersionSpan]:
        """Spans of one version each. Tokens of unknown version are in none."""
        return self.versions_of(0, len(self.ids))

    def versions_of(self, start: int, end: int) -> list[VersionSpan]:
        """The version spans of the tokens from `start` to `end`."""
        spans = []
        for version, run in groupby(self._versions[start:end]):
            end = start + len(list(run))
            if version is not None:
                spans.append(VersionSpan(version=version, start=start, end=end))
            start = end
        return spans


def _kept_sets(
    ids: "array[int]", kept: Sequence[Sequence[int]] | None
) -> "Sequence[array[int] | None]":
    """Without sets, None for each token. Raises: TypeError, OverflowError."""
    if kept is None:
        return [None] * len(ids)
    sets = [array("i", one) for one in kept]
    if len(sets) != len(ids) or any(i not in one for i, one in zip(ids, sets, strict=True)):
        log.warning("ignored kept sets without their tokens", tokens=len(ids), sets=len(sets))
        return [None] * len(ids)
    return sets


def resumable(sampling: Mapping[str, Any]) -> bool:
    """Whether another engine may continue a broken completion after its tokens so far."""
    return all(
        sampling.get(name) is None or sampling[name] in neutral
        for name, neutral in NOT_RESUMABLE.items()
    )
