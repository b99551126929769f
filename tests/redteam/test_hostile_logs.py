"""Code under test and agents that write what is meant to keep the host busy; it must not."""

import asyncio
import resource
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest

from perdure import limited_process
from perdure.graders.base import Graded
from perdure.graders.protocols.test_lists import SwebenchGrader
from perdure.sandboxes.base import Mount, SandboxSpec
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.testing.grader_contract import BASE, diff_of, make_repository, tiny_instance
from perdure.types import Grading, Outcome

FLOODS = {
    "one line of a::": "b'a::' * (20 << 20)",
    "one line of django's words": "b' ... Testing against Django installed in' * (3 << 19)",
    "a line each of django's words": "b' ... Testing against Django installed in \\n' * (3 << 19)",
    "short results": "b'PASSED a\\n' * (7 << 20)",
    "as many results": "b''.join(b'PASSED t%d\\n' % n for n in range(4_000_000))",
    "colours": "b'\\x1b[m\\n' * (15 << 20)",
    "empty lines": "b'\\n' * (62 << 20)",
}
PARSERS = dict.fromkeys(
    ["one line of django's words", "a line each of django's words"], "parse_log_django"
)


@pytest.fixture
def provider(home: Path) -> BubblewrapProvider:
    made = BubblewrapProvider(Settings(home=home))
    if missing := made.check():
        pytest.skip(missing[0])
    return made


def _flooding(content: str) -> bytes:
    """A change whose code writes into the log of the tests, past the runner's own capture."""
    code = f"import os\nwith open('/proc/%d/fd/1' % os.getppid(), 'ab') as log:\n    log.write({content})\n"
    return diff_of({"calc/core.py": code + str(BASE["calc/core.py"])})


async def _graded(provider: BubblewrapProvider, tree: Path, patch: bytes, parser: str) -> Graded:
    instance = tiny_instance()
    if parser.endswith("django"):  # a runner of its words, for which pytest serves here
        grading = Grading.model_validate(
            {**instance.grading.model_dump(), "log_parser": parser, "test_cmd": "python -m pytest -rA tests; true tests"}
        )  # fmt: skip
        instance = instance.model_copy(update={"grading": grading})
    prefixes = {Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
    spec = SandboxSpec(
        workdir="/testbed",
        tree=tree,
        mounts=tuple(Mount(prefix, str(prefix)) for prefix in sorted(prefixes)),
        env={"PATH": f"{sys.prefix}/bin:/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    async with await provider.create(spec, f"p-flood-{uuid4().hex[:8]}") as sandbox:
        return await SwebenchGrader().grade(sandbox, instance, patch, timeout_s=120)


@pytest.mark.parametrize("name", FLOODS, ids=[name.replace(" ", "-") for name in FLOODS])
async def test_a_log_of_64_mb_costs_seconds(
    provider: BubblewrapProvider, tmp_path: Path, name: str
) -> None:
    """Whatever a log of the largest size holds: reward 0, a bounded cost, and a loop that goes on."""
    tree = tmp_path / "tree"
    tree.mkdir()
    make_repository(tree)
    longest = 0.0
    before = _children_cpu()

    async def watch() -> None:
        nonlocal longest
        while True:
            started = time.monotonic()
            await asyncio.sleep(0.05)
            longest = max(longest, time.monotonic() - started)

    watching = asyncio.create_task(watch())
    graded = await _graded(
        provider, tree, _flooding(FLOODS[name]), PARSERS.get(name, "parse_log_sphinx")
    )
    watching.cancel()
    limited_process.end_all()  # so that their time is counted below

    assert graded.grade.outcome is not Outcome.RESOLVED
    assert graded.grade.reward == 0.0
    assert len(graded.log) > 50 << 20
    assert longest < 10, f"the event loop stood still for {longest:.1f} s"
    assert _children_cpu() - before < 2 * limited_process.CPU_S + 10, graded.grade.reason


def _children_cpu() -> float:
    """Seconds of CPU time of this process's children that have ended; keepers are none."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
