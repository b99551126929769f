"""Artifacts of a Harbor task: what moves from the agent's sandbox into the tests' own."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from perdure.graders.artifact_transfer import pack_artifacts, unpack_artifacts
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
    packed = await pack_artifacts(agent, ARTIFACTS)

    assert await unpack_artifacts(tests, ARTIFACTS, packed.data) == ""
    assert await files(tests) == ["absent/own", "lib/a.c", "out/new"]


async def test_too_many_bytes_are_refused_by_name(boxes: list[Sandbox]) -> None:
    """They are not cut: half an archive would be graded as the agent's work."""
    agent, _ = boxes
    await agent.exec("mkdir out; head -c 3000000 /dev/urandom >out/large", check=True)
    packed = await pack_artifacts(agent, ARTIFACTS)

    assert (packed.data, "limits.output_mb" in packed.refused) == (b"", True)


async def test_what_is_no_archive_is_told(boxes: list[Sandbox]) -> None:
    """Code that was root in the agent's sandbox may have replaced its tar."""
    assert "cannot be unpacked" in await unpack_artifacts(boxes[1], ARTIFACTS, b"no archive" * 99)
