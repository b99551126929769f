"""Artifacts of a Harbor task: what moves from the agent's sandbox into the tests' own."""

import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perdure.graders.artifact_transfer import (
    outside_artifacts,
    pack_artifacts,
    unpack_artifacts,
)
from perdure.graders.diff.git_diff_parser import paths_of
from perdure.sandboxes.base import Sandbox, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.types import Limits

ARTIFACTS = {"/testbed/out": (), "/testbed/lib": ("*.o",), "/testbed/absent": ()}


@pytest.fixture
async def boxes(tmp_path: Path) -> AsyncIterator[list[Sandbox]]:
    """The agent's sandbox, and that of the tests."""
    provider = BubblewrapProvider(Settings(home=tmp_path))
    if missing := provider.check():
        pytest.skip(missing[0])
    spec = SandboxSpec("/testbed", limits=Limits(output_mb=1))
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(await provider.create(spec, name))
            for name in ("agent", "tests")
        ]


async def files(box: Sandbox) -> list[str]:
    return (await box.exec("find * -type f | sort", check=True)).stdout.decode().split()


async def test_the_tests_see_the_agents_files_and_no_older_ones(boxes: list[Sandbox]) -> None:
    """An artifact replaces the image's own folder, without the patterns that the task excludes. What the
    agent did not leave stays as the image has it."""
    agent, tests = boxes
    await agent.exec("mkdir out lib; touch out/new lib/a.c lib/a.o other", check=True)
    await tests.exec("mkdir out absent; touch out/old absent/own", check=True)
    packed = await pack_artifacts(agent, ARTIFACTS, output_mb=1)

    assert await unpack_artifacts(tests, ARTIFACTS, packed.data) == ""
    assert await files(tests) == ["absent/own", "lib/a.c", "out/new"]


async def test_patterns_are_for_members_of_a_folder(boxes: list[Sandbox]) -> None:
    """As in Harbor: `./a` is at its top, and a file is kept under any pattern. An empty folder that
    every agent has is no artifact, so that no image needs tar for it."""
    agent, _ = boxes
    await agent.exec("mkdir -p 'o,&/sub'; touch 'o,&/a' 'o,&/sub/a' 'o,&/b' file", check=True)
    await agent.exec("ln -s ./b 'o,&/link'; mkdir -p /logs/artifacts || true")
    artifacts = {"/logs/artifacts": (), "/testbed/o,&": ("./a",), "/testbed/file": ("file",)}
    packed = await pack_artifacts(agent, artifacts, output_mb=1)

    with tarfile.open(fileobj=io.BytesIO(packed.data), ignore_zeros=True) as tar:
        found = {member.name: member.linkname for member in tar if not member.isdir()}
    assert sorted(found) == [
        "testbed/file",
        *(f"testbed/o,&/{name}" for name in ("b", "link", "sub/a")),
    ]
    assert found["testbed/o,&/link"] == "./b"
    assert (await pack_artifacts(agent, {"/logs/artifacts": ()}, output_mb=1)).data == b""


async def test_one_artifact_may_be_inside_another(boxes: list[Sandbox]) -> None:
    agent, tests = boxes
    artifacts: dict[str, tuple[str, ...]] = {"/testbed/out": (), "/testbed/out/sub": ()}
    await agent.exec("mkdir -p out/sub; touch out/a out/sub/b", check=True)
    packed = await pack_artifacts(agent, artifacts, output_mb=1)

    assert await unpack_artifacts(tests, artifacts, packed.data) == ""
    assert await files(tests) == ["out/a", "out/sub/b"]


async def test_too_many_bytes_are_refused_by_name(boxes: list[Sandbox]) -> None:
    """They are not cut: half an archive would be graded as the agent's work."""
    agent, _ = boxes
    await agent.exec("mkdir out; head -c 3000000 /dev/urandom >out/large", check=True)
    packed = await pack_artifacts(agent, ARTIFACTS, output_mb=1)

    assert packed.data == b""
    assert packed.refused.startswith("artifacts_too_large: more than 1 MB")
    assert "phases.agent.limits.output_mb" in packed.refused


async def test_what_is_no_archive_is_told(boxes: list[Sandbox]) -> None:
    """Code that was root in the agent's sandbox may have replaced its tar."""
    assert "cannot be unpacked" in await unpack_artifacts(boxes[1], ARTIFACTS, b"no archive" * 99)


def made_tar(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


async def test_only_the_artifacts_own_paths_are_unpacked(boxes: list[Sandbox]) -> None:
    """An agent that replaced its tar cannot write the tests, or any other file of their sandbox."""
    tests = boxes[1]
    await tests.exec("mkdir hidden; echo real >hidden/test.sh", check=True)
    packed = made_tar(testbed__out__a=b"", testbed__hidden__test=b"", testbed__lib2=b"")

    assert await unpack_artifacts(tests, ARTIFACTS, packed) == ""
    assert await files(tests) == ["hidden/test.sh", "out/a"]


async def test_the_repository_of_the_tests_stays(boxes: list[Sandbox]) -> None:
    """Git would run what the agent's own `.git` configures."""
    tests = boxes[1]
    await tests.exec("mkdir .git old; echo real >.git/config; touch old/file", check=True)
    hostile = {"testbed__.git__config": b"hostile", "testbed//.git/config": b"hostile"}
    packed = made_tar(testbed__new=b"", **hostile)

    assert await unpack_artifacts(tests, {"/testbed": ()}, packed) == ""
    assert await files(tests) == ["new"]
    assert (await tests.exec("ls .git; cat .git/config")).stdout == b"config\nreal\n"


async def test_the_folder_of_temporary_files_may_be_an_artifact(boxes: list[Sandbox]) -> None:
    """It is also where the tar arrives."""
    packed = made_tar(tmp__answer=b"5")

    assert await unpack_artifacts(boxes[1], {"/tmp": ()}, packed) == ""
    assert (await boxes[1].exec("ls -A /tmp")).stdout == b"answer\n"


@pytest.mark.parametrize(
    ("artifacts", "kept"),
    [
        (("/app/out", "/elsewhere"), ["outer", "src/a"]),
        (("/app/src/",), ["out/new", "outer"]),
        (("/app",), []),
        (("/",), []),
        (("/elsewhere",), ["out/new", "outer", "src/a"]),
    ],
)
def test_the_diff_leaves_out_what_the_artifacts_contain(
    artifacts: tuple[str, ...], kept: list[str]
) -> None:
    """Both would write the same file, and `git apply` refuses one that exists."""
    names = ("out/new", "outer", "src/a")
    added = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+1\n"
    diff = "".join(added.format(name) for name in names).encode()
    found = outside_artifacts(diff, "/app", artifacts)

    assert sorted(path.decode() for path in paths_of(found)) == kept
