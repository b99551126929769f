"""Sets an image's tree to its row's base state, in the agent's sandbox and in the grader's."""

import io
import shlex
import tarfile

from perdure.errors import InstanceError
from perdure.graders.image.history_removal import cut_history
from perdure.sandboxes.base import Sandbox
from perdure.types import CommittedTests, Instance

LIMIT_S = 600.0


async def set_up_image(sandbox: Sandbox, instance: Instance) -> None:
    """Before hostile code runs, apply `environment.remove` and `grading.pre_commands`, then cut
    history.

    Raises: InstanceError naming the field that fails in the image; SandboxLost.
    """
    paths, commands = instance.environment.remove, instance.grading.pre_commands
    if paths:
        await _run(sandbox, instance, "environment.remove", shlex.join(["rm", "-rf", "--", *paths]))
    if commands:
        await _run(sandbox, instance, "pre_commands", "set -e\n" + "\n".join(commands))
    await cut_history(sandbox, instance.base_commit)


async def with_committed_tests(sandbox: Sandbox, instance: Instance) -> Instance:
    """The instance with the tests of `grading.tests_from` in `grading.files`, which replace its
    `test_patch`. Call it in the grader's sandbox, before `set_up_image` removes their commit.

    Raises: InstanceError if the image lacks the commit or the paths; SandboxLost.
    """
    tests = instance.grading.tests_from
    if tests is None:
        return instance
    packed = await _run(sandbox, instance, "grading.tests_from", _archive(tests))
    files = {**instance.grading.files, **_unpacked(packed)}
    grading = instance.grading.model_copy(update={"files": files, "test_patch": b""})
    return instance.model_copy(update={"grading": grading})


def _archive(tests: CommittedTests) -> str:
    git = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "archive"]
    return shlex.join([*git, "--format=tar", tests.commit, "--", *tests.paths])


def _unpacked(packed: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = [member for member in tar if member.isfile()]
        return {member.name: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]  # it is a file


async def _run(sandbox: Sandbox, instance: Instance, field: str, script: str) -> bytes:
    done = await sandbox.exec(["bash", "-c", script], cwd=sandbox.workdir, timeout=LIMIT_S)
    if not done.status.ok:
        said = (done.stderr or done.stdout)[-300:].decode("utf-8", "replace").strip()
        raise InstanceError(f"{instance.ref}: `{field}` failed in its image: {said or done.status}")
    return done.stdout
