"""What has been sampled of a turn so far, by which engine and policy version, token by token."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from perdure.types import EngineSpan, VersionSpan


@dataclass
class Salvage:
    """A growing completion that outlives the engines that made it. Shapes: ids, logprobs [C].

    Example:
        salvage.begin("vllm 10.0.0.7:8000", generation=17)
        salvage.add([5, 6], [-0.1, -0.2], version=3)
        salvage.report([VersionSpan(version=3, start=0, end=2)])   # only a whole answer has these
    """

    ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    engines: list[EngineSpan] = field(default_factory=list)
    _versions: list[int | None] = field(default_factory=list)
    _engine: tuple[str, int] = ("", 0)
    _begun: int = 0

    def begin(self, engine: str, generation: int) -> None:
        """What follows comes from this engine."""
        self._engine, self._begun = (engine, generation), len(self.ids)

    def add(self, ids: Sequence[int], logprobs: Sequence[float], version: int | None) -> None:
        """`version`: the one known while these arrived."""
        if not ids:
            return
        start, end = len(self.ids), len(self.ids) + len(ids)
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self._versions += [version] * len(ids)
        name, generation = self._engine
        if self.engines and start > self._begun:
            start = self.engines.pop().start
        self.engines.append(EngineSpan(engine=name, generation=generation, start=start, end=end))

    def report(self, spans: Sequence[VersionSpan]) -> None:
        """The engine's own word on its part of the completion, counted from where it began."""
        for span in spans:
            at = slice(self._begun + span.start, self._begun + span.end)
            self._versions[at] = [span.version] * (span.end - span.start)

    def cut(self, length: int = 0) -> None:
        """Keep so many tokens: what cannot be continued, or trusted, is let go."""
        del self.ids[length:], self.logprobs[length:], self._versions[length:]
        kept = [span for span in self.engines if span.start < length]
        self.engines = [s.model_copy(update={"end": min(s.end, length)}) for s in kept]

    @property
    def part(self) -> int:
        """Tokens of the engine at work."""
        return len(self.ids) - self._begun

    @property
    def versions(self) -> list[VersionSpan]:
        """Runs of one version; tokens whose version nobody knows are in none."""
        spans, start = [], 0
        for version, run in groupby(self._versions):
            end = start + len(list(run))
            if version is not None:
                spans.append(VersionSpan(version=version, start=start, end=end))
            start = end
        return spans
