"""`merge_turns`: the rule of slime's coding-agent example until July 2026, for prompts that are
rerendered.

Perdure's own turns are bridged from recorded ids, so this rule changes only turns recorded
elsewhere and histories that the agent edited.
"""

from collections.abc import Callable, Sequence

from perdure.episodes.slime_tree_segments import TokenSequence
from perdure.types import Turn


def merge_turns(
    turns: Sequence[Turn], versions_of: Callable[[Turn], Sequence[int]]
) -> list[TokenSequence]:
    """The sequences of one chain. `versions_of`: one policy version per sampled token.

    A prompt's new tokens are context with mask 0; its answer has mask 1. From the first token that
    a prompt does not repeat, the sequence is dropped. If that cuts an answer, its first part
    becomes context. A prompt that does not start with the sequence's first prompt starts the next
    sequence.
    """
    found: list[TokenSequence] = []
    for turn in turns:
        kept = found[-1].count_shared_prefix(turn) if found else 0
        if not found or kept < found[-1].prompt:
            found.append(TokenSequence())
        else:
            found[-1].drop_from(kept)
        found[-1].add(turn, versions_of(turn), trained=True)
    return found
