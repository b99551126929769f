"""Which images a Dockerfile needs, by what name they are pulled, and how a hung build ends."""

import asyncio
import sys
from pathlib import Path

import pytest

from perdure.sandboxes.base import Network
from perdure.sandboxes.image_builds import (
    ImageBuild,
    base_images,
    image_name_of,
    qualified_name,
    run_build,
)
from perdure.types import Limits


@pytest.mark.parametrize(
    ("dockerfile", "images"),
    [
        ("FROM ubuntu:24.04\nRUN true\n", ["ubuntu:24.04"]),
        ("# syntax=x\nfrom --platform=linux/amd64 a/b:1 as one\nFROM one\n", ["a/b:1"]),
        ("ARG BASE=debian\nARG TAG\nFROM ${BASE}:${TAG:-12}\n", ["debian:12"]),
        ("ARG BASE\nFROM $BASE\n", []),
        ("FROM scratch\nCOPY --from=ghcr.io/a/uv:1 /uv /\n", ["ghcr.io/a/uv:1"]),
        ("FROM a AS b\nFROM c\nCOPY --chown=1 --from=b / /\nCOPY --from=0 / /\n", ["a", "c"]),
        ("FROM a\nRUN --mount=type=bind,from=tools,target=/t \\\n  true\n", ["a", "tools"]),
        ("FROM \\\n  a\nRUN echo FROM b --from=c\n", ["a"]),
        ("FROM a\nRUN <<'END'\nFROM b\nEND\nCOPY --from=c / /\n", ["a", "c"]),
        ("FROM a\nRUN cat <<-END>/x && true\nFROM b\nEND\nFROM c\n", ["a", "c"]),
        ("FROM a AS one\nRUN echo $((1<<2)) a<<b\nFROM c\n", ["a", "c"]),
    ],
)
def test_images_that_a_dockerfile_names(dockerfile: str, images: list[str]) -> None:
    """Stages, comments and names without a value are none."""
    assert base_images(dockerfile) == images


@pytest.mark.parametrize(
    ("name", "pulled"),
    [
        ("ubuntu:24.04", "docker.io/library/ubuntu:24.04"),
        ("a/b", "docker.io/a/b"),
        ("docker.io/a/b", "docker.io/a/b"),
        ("localhost/x:1", "localhost/x:1"),
        ("127.0.0.1:5000/x", "127.0.0.1:5000/x"),
    ],
)
def test_names_are_dockers(name: str, pulled: str) -> None:
    """Without a registry a name is Docker Hub's, whatever podman is configured for."""
    assert qualified_name(name) == pulled


def a_build(folder: Path, timeout_s: float) -> ImageBuild:
    limits = Limits(output_mb=1)
    return ImageBuild(
        image_name_of("0" * 64),
        folder,
        limits,
        limits,
        timeout_s,
        Network.NONE,
        None,
        {},
        folder / "log",
        1,
    )


async def test_output_is_bounded_and_ends_in_the_last_lines(tmp_path: Path) -> None:
    program = "for n in range(2000): print('x' * 1000, n)\nraise SystemExit(3)"

    output = await run_build(
        [sys.executable, "-c", program], a_build(tmp_path, 60), ends_on_signal=True
    )

    assert output.code == 3
    assert output.tail.endswith("x 1999")
    assert (tmp_path / "log").stat().st_size < 1.1 * (1 << 20)


async def test_a_build_that_exceeds_its_time_ends(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo begun; exec sleep 600"]

    async with asyncio.timeout(20):
        output = await run_build(command, a_build(tmp_path, 0.5), ends_on_signal=True)

    assert (output.code, output.tail) == (None, "begun")


async def test_a_cancelled_build_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C in `images prepare`, or a cancelled rollout: the build ends, and cleans up."""
    pid = tmp_path / "pid"
    command = ["sh", "-c", f"echo $$ >{pid}.new; mv {pid}.new {pid}; exec sleep 600"]
    building = asyncio.create_task(run_build(command, a_build(tmp_path, 600), ends_on_signal=True))
    while not pid.exists():
        await asyncio.sleep(0.02)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building

    assert not Path("/proc", pid.read_text().strip()).exists()
