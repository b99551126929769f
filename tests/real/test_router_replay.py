"""A tiny random mixture of experts in float32: what a trainer replays reproduces its logprobs.

Run by `make test-trainers`, in the trainers' environment, because it needs torch.
"""

from typing import Any

import pytest
import pytest_asyncio

from tests.real import trainers_here

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXACT = 1e-5


@pytest.fixture(scope="module", autouse=True)
def _trainers() -> None:
    trainers_here.install()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replayed() -> Any:
    return await trainers_here.run("moe_replay.py", "verl", "skyrl", "verifiers")


@pytest.mark.parametrize("trainer", ["slime", "verl", "skyrl", "verifiers"])
async def test_replayed_experts_reproduce_the_logprobs(replayed: Any, trainer: str) -> None:
    """This holds for all turns of a bridged conversation, after the trainer's own conversion. Each
    turn recorded only the experts of its new positions."""
    assert (replayed["turns"], replayed["rows"][0]) == (3, replayed["rows"][1])
    assert replayed["starts"][0] == 0 < replayed["starts"][1] < replayed["starts"][2]
    assert replayed[trainer] < EXACT


@pytest.mark.parametrize("routing", ["a token late", "a layer late", "other experts"])
async def test_wrong_experts_change_the_logprobs(replayed: Any, routing: str) -> None:
    """So the test above would fail for an array that is shifted, transposed or of other tokens."""
    assert replayed[routing] > 1000 * EXACT


# --- the kept sets of top-p ------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept() -> Any:
    return await trainers_here.run("kept_sets.py", *_slime())


def _slime() -> list[str]:
    return ["slime"] if trainers_here.SLIME.exists() else []


@pytest.mark.parametrize("trainer", ["slime", "skyrl", "verifiers"])
async def test_kept_sets_reproduce_the_logprobs(kept: Any, trainer: str) -> None:
    """After the trainer's own conversion, for the tokens of both turns."""
    if trainer == "slime":
        trainers_here.need_slime()

    assert kept[trainer] < EXACT


async def test_the_whole_vocabulary_does_not(kept: Any) -> None:
    """So the test above would fail without sets."""
    assert kept["whole vocabulary"] > 1000 * EXACT
