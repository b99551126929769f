"""slime's own tests of its trajectories, each replayed through Perdure's copy of the rule. Prints JSON.

    python tests/real/trainers/slime_tree.py SLIME

Every session that those tests record, and every sample that slime's manager cuts from it, is noted; ours
must be equal in tokens, masks and logprobs.
"""

# mypy: ignore-errors

import inspect
import json
import sys
import types

sys.modules["tests"] = types.ModuleType("tests")  # wheels of other trainers install one
sys.modules["tests"].__path__ = [f"{sys.argv[1]}/tests"]

from tests.test_agent import test_trajectory_manager_branching as published  # noqa: E402

from perdure.episodes.slime_tree_segments import TurnMessages, cut_like_slime  # noqa: E402
from perdure.episodes.trajectory_segments import token_versions  # noqa: E402
from perdure.types import Turn  # noqa: E402

NOTED = []


class Noting(published.TrajectoryManager):
    """slime's manager; `NOTED` has (threshold, turns, samples) of each session that is cut."""

    def __init__(self, **options):
        super().__init__(**options)
        self.spoken = {}

    def record_turn(self, sid, *, turn, prompt_messages, response_message, **more):
        super().record_turn(
            sid,
            turn=turn,
            prompt_messages=prompt_messages,
            response_message=response_message,
            **more,
        )
        known = self.spoken.setdefault(sid, [])
        ours = Turn(
            index=len(known),
            prompt_ids=tuple(turn.prompt_ids),
            completion_ids=tuple(turn.output_ids),
            logprobs=tuple(turn.output_log_probs or [0.0] * len(turn.output_ids)),
        )
        known.append(TurnMessages(ours, prompt_messages, response_message))

    def get_trajectory(self, sid, **options):
        now = {node.turn_index: node.turn for node in _nodes(self._trees.get(sid)) if node.turn}
        spoken = [_as_now(one, now.get(one.turn.index + 1)) for one in self.spoken.pop(sid, [])]
        cut = super().get_trajectory(sid, **options)
        NOTED.append((self._fork_threshold, spoken, cut, options))
        return cut


def _nodes(node):
    if node is not None:
        yield node
        for child in node.children:
            yield from _nodes(child)


def _as_now(spoken, turn):
    """One test sets logprobs after its turn was recorded."""
    if turn is None or not turn.output_log_probs:
        return spoken
    told = {"logprobs": tuple(turn.output_log_probs)}
    return spoken._replace(turn=spoken.turn.model_copy(update=told))


def main():
    published.TrajectoryManager = Noting
    tests = [
        test
        for name, test in inspect.getmembers(published, inspect.isfunction)
        if name.startswith("test_") and not inspect.signature(test).parameters
    ]
    ran, differing = {}, []
    for test in tests:
        NOTED.clear()
        test()
        ran[test.__name__] = len(NOTED)
        differing += [test.__name__ for one in NOTED if not _equal(*one)]
    return {"tests": len(ran), "sessions": sum(ran.values()), "differing": differing, "ran": ran}


def _equal(threshold, spoken, samples, options):
    if options.get("max_sample_tokens"):
        return True  # a limit of slime's export, which is not the rule
    found = cut_like_slime(spoken, token_versions, threshold=threshold)
    ours = [(one.ids, one.loss_mask[one.prompt :], one.logprobs[one.prompt :]) for one in found]
    return ours == [(one.tokens, one.loss_mask, one.rollout_log_probs) for one in samples]


if __name__ == "__main__":
    print(json.dumps(main()))
