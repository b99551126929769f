"""Made turns of a rollout, for programs that cannot import `tests` too."""

from perdure.types import Turn, VersionSpan

LOGPROBS = (-0.5, -0.25)


def turns(version: int, sample_index: int = 0) -> tuple[Turn, ...]:
    """Two turns, of `version` and the one after it. The second one extends the first one."""
    first = 20 + sample_index
    return (
        _turn(0, (11, 12), first, version),
        _turn(1, (11, 12, first, 31), 40, version + 1, parent=0),
    )


def _turn(
    index: int, prompt: tuple[int, ...], sampled: int, version: int, parent: int | None = None
) -> Turn:
    return Turn(
        index=index,
        prompt_ids=prompt,
        completion_ids=(sampled,),
        logprobs=(LOGPROBS[index],),
        versions=(VersionSpan(version=version, start=0, end=1),),
        parent=parent,
    )
