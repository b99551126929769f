"""Patches from other tools in every spelling that swebench 5.0.2 applies, on real sandboxes: the
command that applies each is the one that swebench reports, and the grader gets git's own diff."""

import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest
import pytest_asyncio
from temporalio.testing import ActivityEnvironment

from activities.rollout_activities import Stages
from perdure.graders.diff.git_diff_parser import parse
from perdure.instances import instance_catalog
from perdure.instances.base_trees import pack
from perdure.instances.host_git import commit_all
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import AgentRun, Attempt
from perdure.rollouts.prediction_application import COMMANDS
from perdure.rollouts.predictions import Prediction, place
from perdure.rollouts.stage_services import Services
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.storage.base import put_blob
from perdure.types import (
    AgentEnd,
    Grade,
    Grading,
    Instance,
    Outcome,
    PatchRef,
    RunRequest,
    Source,
    SourceKind,
)
from tests.stack.host_requirements import why_not_here

pytestmark = pytest.mark.asyncio(loop_scope="module")

GIT, _, _, PATCH = COMMANDS
ROW = "toy/add-1"
RUN = RunRequest(
    run_id="r",
    instances=(ROW,),
    rollout={"agent": "predictions", "agent_options": {"predictions_sha256": "0"}, "model": "m"},
)
BASE = "".join(f"line {number}\n" for number in range(1, 41))
BODY = """\
--- a/a.txt
+++ b/a.txt
@@ -8,7 +8,7 @@ line 7
 line 8
 line 9
 line 10
-line 11
+fixed
 line 12
 line 13
 line 14
@@ -27,5 +27,5 @@ line 26
 line 27
 line 28
-line 29
+fixed too
 line 30
 line 31
"""
TITLE = "diff --git a/a.txt b/a.txt\n"
PLAIN = f"{TITLE}{BODY}"
BINARY = "diff --git a/x.bin b/x.bin\nnew file mode 100644\nindex 0000000..1234567\nBinary files /dev/null and b/x.bin differ\n"  # fmt: skip
GITLINK = "diff --git a/lib b/lib\nnew file mode 160000\nindex 0000000..0123456\n--- /dev/null\n+++ b/lib\n@@ -0,0 +1 @@\n+Subproject commit 0123456789012345678901234567890123456789\n"  # fmt: skip
TWICE = f"{TITLE}--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n-line 1\n+first\n line 2\n"
CONFTEST = "--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+import os\n"
HOOKED = "--- a/.git/config\n+++ b/.git/config\n@@ -1,1 +1,2 @@\n [core]\n+\tfsmonitor = touch /testbed/ran\n"
FROM_LINES = "From 01234567 Mon Sep 17 00:00:00 2001\nFrom: A <a@b>\nSubject: [PATCH] Fix\n\nText.\n---\n a.txt | 4 ++--\n\n"  # fmt: skip

APPLIED: dict[str, tuple[str, str]] = {
    "plain": (GIT, PLAIN),
    "no newline at the end": (PATCH, PLAIN.removesuffix("\n")),
    "CRLF": (PATCH, PLAIN.replace("\n", "\r\n")),
    "format-patch": (GIT, f"{FROM_LINES}{PLAIN}-- \n2.39.5\n\n"),
    "markdown fence": (GIT, f"Here it is:\n```diff\n{PLAIN}```\n"),
    "no diff --git lines": (GIT, BODY),
    "mnemonic prefixes": (GIT, PLAIN.replace("a/a.txt", "i/a.txt").replace("b/a.txt", "w/a.txt")),
    "gitlink beside it": (GIT, PLAIN + GITLINK),
    "mode 100664": (GIT, PLAIN.replace(TITLE, f"{TITLE}index 0123456..1234567 100664\n")),
    "context that needs fuzz": (PATCH, PLAIN.replace(" line 8\n", " line eight\n")),
    "wrong line numbers": (GIT, PLAIN.replace("@@ -8,7 +8,7 @@", "@@ -3,7 +3,7 @@")),
}
"""Spelling -> the command of swebench that applies it, and the patch."""
REFUSED = {
    "no a/ and b/": PLAIN.replace("a/a.txt", "a.txt").replace("b/a.txt", "a.txt"),
    "another file": PLAIN.replace("a.txt", "b.txt"),
    "a wrong line": PLAIN.replace("-line 11", "-line eleven"),
    "no diff": "I could not fix it.\n",
}


@dataclass(frozen=True)
class Played:
    """What a rollout of one prediction left in the store."""

    run: AgentRun
    patch: PatchRef
    data: bytes
    grade: Grade | None = None


class Player:
    """Plays one prediction after the other in sandboxes of one row."""

    def __init__(self, services: Services, diff: bytes) -> None:
        self.services = services
        self.diff = diff
        """The fix, as a capture writes it."""

    async def play(self, patch: str, *, graded: bool = False) -> Played:
        run = RUN.model_copy(update={"run_id": uuid4().hex})
        store = self.services.store
        await place(store, run, {"add-1": ROW}, [Prediction("add-1", 0, patch.encode(), "m")])
        request = run.rollout_request(ROW)
        attempt = Attempt(request=request, attempt=1)
        stages, folder = Stages(self.services), store_keys.attempt(request, 1)
        await ActivityEnvironment().run(stages.boot, attempt)
        agent = await ActivityEnvironment().run(stages.run_agent, attempt)
        await ActivityEnvironment().run(stages.capture, attempt)
        captured = await stage_checkpoints.read(store, f"{folder}/patch.json", PatchRef)
        assert captured is not None
        grade = None
        if graded:
            done = await ActivityEnvironment().run(stages.grade, attempt)
            grade = await stage_checkpoints.read(store, f"{folder}/{done.stored_as}", Grade)
        return Played(agent, captured, (await store.get(captured.key)).data, grade)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def player(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Player]:
    if missing := why_not_here():
        pytest.skip(missing)
    home = tmp_path_factory.mktemp("predictions")
    services = Services(Settings(home=home / "home", store=str(home / "store")))
    (tree := home / "tree").mkdir()
    (tree / "a.txt").write_text(BASE)
    (tree / "old name.py").write_text(BASE)
    (tree / ".gitignore").write_text("*.log\nbuild/\n")
    source = Source(kind=SourceKind.BLOB, key=await put_blob(services.store, pack(tree)))
    grading = Grading(protocol="eval_cmd", eval_cmd="grep -q fixed a.txt")
    row = Instance(
        instance_id="add-1", dataset="toy", problem_statement="x", source=source, grading=grading
    )
    await instance_catalog.save(services.store, row)
    yield Player(services, _diff_of(tree))


def _diff_of(tree: Path) -> bytes:
    commit_all(tree)
    fixed = BASE.replace("line 11\n", "fixed\n").replace("line 29\n", "fixed too\n")
    (tree / "a.txt").write_text(fixed)
    command = ["git", "-C", str(tree), "diff", "--full-index"]
    return subprocess.run(command, check=True, capture_output=True).stdout


@pytest.mark.parametrize("spelling", APPLIED)
async def test_a_spelling_becomes_gits_own(player: Player, spelling: str) -> None:
    """The rollout says by which command, and its diff is byte for byte that of an agent who made the
    same change."""
    command, patch = APPLIED[spelling]

    found = await player.play(patch)

    assert (found.run.end, found.run.detail) == (AgentEnd.FINISHED, f"applied by `{command}`")
    assert found.data == player.diff
    assert found.run.model == "m"


@pytest.mark.parametrize("spelling", REFUSED)
async def test_what_swebench_refuses_has_a_verdict(player: Player, spelling: str) -> None:
    """The patch is to blame, so the rollout is graded: `apply_failed`, with git's reason."""
    found = await player.play(REFUSED[spelling], graded=True)

    assert found.run.end is AgentEnd.GAVE_UP
    assert not found.run.broke
    assert found.grade is not None
    assert (found.grade.outcome, found.grade.reward) == (Outcome.APPLY_FAILED, 0.0)
    assert found.grade.reason.startswith("no command of swebench applies it: error: ")
    assert found.data == REFUSED[spelling].encode()


async def test_a_file_twice_and_a_rename_are_applied(player: Player) -> None:
    """Git applies the second part of a file to the result of the first."""
    rename = "diff --git a/old name.py b/new.py\nsimilarity index 100%\nrename from old name.py\nrename to new.py\n"

    found = await player.play(PLAIN + TWICE + rename)

    assert found.run.detail == f"applied by `{GIT}`"
    assert {file.new_path for file in parse(found.data)} == {b"a.txt", b"old name.py", b"new.py"}
    assert b"+first\n" in found.data
    assert b"+fixed too\n" in found.data


async def test_a_binary_without_content_is_an_empty_file(player: Player) -> None:
    """`patch` makes it; git refuses the whole patch."""
    found = await player.play(PLAIN + BINARY)

    assert found.run.detail == f"applied by `{PATCH}`"
    assert found.data.startswith(
        player.diff + b"diff --git a/x.bin b/x.bin\nnew file mode 100644\n"
    )


async def test_an_ignored_file_is_part_of_the_patch(player: Player) -> None:
    """swebench applies the file whatever .gitignore says, so the grader gets it too."""
    new = "--- /dev/null\n+++ b/build/[x] y.log\n@@ -0,0 +1 @@\n+one\n"

    found = await player.play(BODY + new)

    assert found.run.detail == f"applied by `{GIT}`"
    assert found.data.startswith(player.diff)
    assert [file.new_path for file in parse(found.data)] == [b"a.txt", b"build/[x] y.log"]


async def test_no_spelling_hides_a_file_from_the_filter(player: Player) -> None:
    """`conftest.py` is dropped from a patch that the strict parser could not read."""
    found = await player.play(f"Text.\n{BODY}{CONFTEST}", graded=True)

    assert found.grade is not None
    assert found.grade.outcome is Outcome.RESOLVED
    assert found.grade.dropped_paths == ("conftest.py",)


async def test_git_configuration_is_no_part_of_the_fix(player: Player) -> None:
    """`patch` writes into `.git`, which git refuses. The capture trusts none of it."""
    found = await player.play(BODY + HOOKED)

    assert found.run.detail == f"applied by `{PATCH}`"
    assert found.data == player.diff


@pytest.mark.parametrize("patch", ["", "\n"])
async def test_an_empty_prediction_is_graded_without_tests(player: Player, patch: str) -> None:
    """Its reward is 0, even where the base passes its tests."""
    found = await player.play(patch, graded=True)

    assert found.run.detail == "the prediction is empty"
    assert found.grade is not None
    assert found.grade.outcome is Outcome.EMPTY_PATCH
