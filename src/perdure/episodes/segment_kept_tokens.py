"""Places the kept sets that a segment's turns recorded at the segment's trained tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from perdure.types import Segment, Turn
from perdure.types.kept_tokens import Ids


class KeptSets(NamedTuple):
    """The kept set of response token i is `ids[offsets[i] : offsets[i + 1]]`. It is empty where the
    segment's `loss_mask` is 0. Shapes: offsets [R + 1], ids [offsets[-1]], both int32."""

    offsets: Ids
    ids: Ids


def segment_kept_tokens(
    turns: Sequence[Turn], segments: Sequence[Segment]
) -> list[KeptSets | None]:
    """The kept sets of each segment. None if any trained token lacks one, because a trainer would
    normalise that token over the whole vocabulary."""
    known = {turn.index: turn for turn in turns}
    return [_placed([known[index] for index in one.turns], one) for one in segments]


def _placed(turns: Sequence[Turn], segment: Segment) -> KeptSets | None:
    import numpy

    counts: Ids = numpy.zeros(len(segment.response_ids), numpy.int32)
    parts: list[Ids] = []
    for turn in turns:
        start = len(turn.prompt_ids) - len(segment.prompt_ids)
        end = min(start + len(turn.completion_ids), len(counts))
        trained = numpy.array(segment.loss_mask[start:end], bool)
        if start < 0 or not trained.any():
            continue  # context, such as an answer that another segment trains
        same = turn.completion_ids[: end - start] == segment.response_ids[start:end]
        if turn.kept_tokens is None or not same:
            return None  # slime's cuts may drop tokens between two turns
        sizes = turn.kept_tokens.counts()
        taken = numpy.concatenate([trained, numpy.zeros(len(sizes) - len(trained), bool)])
        counts[start:end] = numpy.where(trained, sizes[: end - start], 0)
        parts.append(turn.kept_tokens.ids()[numpy.repeat(taken, sizes)])
    if bool((counts == 0)[numpy.array(segment.loss_mask, bool)].any()):
        return None
    offsets = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int32)
    return KeptSets(offsets, numpy.concatenate(parts) if parts else numpy.zeros(0, numpy.int32))
