"""The trainers' environment, and programs that run in it beside a stack of a test."""

import asyncio
import json
import os
import subprocess
import tempfile
from typing import Any

import pytest

from tests.checkout_paths import ROOT
from tests.stack.running_stack import Stack

FOLDER = ROOT / ".perdure/trainers"
PYTHON = FOLDER / "venv/bin/python"
CLONES = SLIME, PRIME_RL = FOLDER / "slime", FOLDER / "prime-rl"
PROGRAMS = ROOT / "tests/real/trainers"


def install() -> None:
    """Once; skips the test where the packages cannot be had."""
    setup = [ROOT / "infra/setup/trainers", FOLDER]
    done = subprocess.run(setup, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = " ".join(done.stderr.split())[-300:]
        pytest.skip(f"the trainers cannot be had here: {said}")


def environment(stack: Stack) -> dict[str, str]:
    """What a trainer's process is told of a stack."""
    return {
        "PERDURE_HOME": str(stack.home),
        "PERDURE_STORE": stack.settings.store,
        "TEMPORAL_ADDRESS": str(stack.plan.addresses.temporal_address),
    }


def need_slime() -> None:
    if not SLIME.exists():
        pytest.skip("slime is on no index: PERDURE_TEST_SLIME names a clone of it")


def need_prime_rl() -> None:
    if not PRIME_RL.exists():
        pytest.skip("prime-rl is on no index: PERDURE_TEST_PRIME_RL names a clone of it")


async def run(program: str, *arguments: object, **environment: str) -> Any:
    """What a program of `PROGRAMS` prints last, read as JSON."""
    paths = os.pathsep.join(str(one) for one in (ROOT, SLIME))
    inherited = {name: text for name, text in os.environ.items() if name != "RAY_ADDRESS"}
    # Ray joins the cluster that its folder names, so a trainer has a folder of its own; a short one,
    # because Ray's sockets are in it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray:
        process = await asyncio.create_subprocess_exec(
            *(str(one) for one in (PYTHON, "-W", "ignore", PROGRAMS / program, *arguments)),
            cwd=ROOT,
            env={**inherited, "PYTHONPATH": paths, "RAY_TMPDIR": ray, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, f"{program}: {err.decode()[-3000:]}"
    return json.loads(out.splitlines()[-1])
