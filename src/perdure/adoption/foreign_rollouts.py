"""Attempts of another program at instances, and what a run makes of each."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from perdure.errors import ConfigurationError
from perdure.types import Adopted, Frozen, slugify

REWARD = "reward"
"""The score that counts if there are several and the user names none: Harbor's own default."""


class ForeignRollout(Frozen):
    """One attempt of another program.

    Example:
        ForeignRollout(instance_id="fix-1", origin="Harbor 0.26.0", file="fix-1__a8K2x/result.json",
                       agent="claude-code", scores={"reward": 0.0}, patch="diff --git ...")
    """

    instance_id: str = Field(min_length=1)
    origin: str
    file: str
    agent: str = ""
    model: str = ""
    scores: dict[str, float] | None = None
    """Its verdict, by the names of its scores; None if it has none."""
    patch: str | None = None
    """The whole diff that its agent left, byte for byte (surrogateescape); None if it is unknown, or
    if something other than the agent ended its work."""
    lacks: str = ""
    """Why it has no verdict."""

    @property
    def has_work(self) -> bool:
        """Whether a rollout can keep or grade it."""
        return self.scores is not None or self.patch is not None

    @property
    def maker(self) -> str:
        return f"{self.agent or 'an unnamed agent'} with {self.model or 'an unnamed model'}"

    @property
    def data(self) -> bytes | None:
        return None if self.patch is None else self.patch.encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Reading:
    """The results in a folder. `notes`: a sentence for each incomplete file."""

    rollouts: tuple[ForeignRollout, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    """A foreign attempt as a sample of a run."""

    ref: str
    sample_index: int
    adopted: Adopted
    patch: bytes | None


def of_one_maker(rollouts: Sequence[ForeignRollout], by: str) -> list[ForeignRollout]:
    """The attempts of one agent with one model. `by`: the name of the agent or model to keep.
    Attempts without a verdict or a patch may come from others.

    Raises: ConfigurationError that lists agents and models if there are several.
    """
    kept = [one for one in rollouts if by in ("", one.agent, one.model)]
    makers = dict.fromkeys(one.maker for one in kept or rollouts if one.has_work)
    if kept and len(makers) <= 1:
        return kept
    problem = "a run takes the results of only one" if kept else f"none is named {by!r}"
    raise ConfigurationError(
        f"the results are by {', '.join(makers)}, and {problem}: choose an agent or a model with "
        "--by NAME"
    )


def places(
    rollouts: Sequence[ForeignRollout], refs: Mapping[str, str], score: str
) -> tuple[list[Placed], list[ForeignRollout]]:
    """Each attempt with a verdict or a patch as a sample of its instance, verdicts first, and the
    attempts whose instance is unknown.

    `refs`: instance id -> reference. `score`: the score that counts; empty: the only one, or `reward`.
    Raises: ConfigurationError naming the file and its scores.
    """
    unknown = []
    by_ref: defaultdict[str, list[ForeignRollout]] = defaultdict(list)
    for one in rollouts:
        ref = refs.get(one.instance_id) or refs.get(slugify(one.instance_id))
        if ref is None:
            unknown.append(one)
        elif one.has_work:
            by_ref[ref].append(one)
    found = []
    for ref, attempts in by_ref.items():
        attempts.sort(key=lambda one: one.scores is None)
        found += [_placed(ref, index, one, score) for index, one in enumerate(attempts)]
    return found, unknown


def most_samples(placed: Sequence[Placed]) -> int:
    """The largest number of samples of an instance; at least 1."""
    return max(Counter(one.ref for one in placed).values(), default=1)


def digest_of(placed: Sequence[Placed]) -> str:
    """Changes with every verdict and patch."""
    known = [(one.ref, one.sample_index, one.adopted.model_dump(mode="json")) for one in placed]
    return hashlib.sha256(json.dumps(sorted(known, key=str)).encode()).hexdigest()


def _placed(ref: str, index: int, one: ForeignRollout, score: str) -> Placed:
    name, reward = _chosen(one, score)
    adopted = Adopted(
        origin=one.origin,
        file=one.file,
        agent=one.agent,
        model=one.model,
        score=name,
        reward=reward,
        patch_sha256=hashlib.sha256(one.data).hexdigest() if one.data is not None else "",
    )
    return Placed(ref, index, adopted, one.data)


def _chosen(one: ForeignRollout, score: str) -> tuple[str, float | None]:
    scores = one.scores
    if scores is None:
        return "", None
    name = score or (REWARD if REWARD in scores or len(scores) > 1 else next(iter(scores)))
    if name not in scores:
        raise ConfigurationError(
            f"{one.file} has no score {name!r}, only {', '.join(scores)}: choose with --score NAME"
        )
    return name, scores[name]
