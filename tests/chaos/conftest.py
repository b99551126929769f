"""One private stack per module; processes that a test killed are restarted for the next one."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.stack.host_requirements import why_not_here
from tests.stack.running_stack import DEATH_S, Stack, running


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds", default="1", help="seeds of the drawn chaos, separated by commas")
    parser.addoption("--rollouts", default=24, type=int, help="rollouts of the tests that scale")
    parser.addoption("--ray", action="store_true", help="engines of the drawn chaos on Ray nodes")
    parser.addoption(
        "--silent", default=24.0, type=float, help="seconds after which a silent host is lost"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames and "rollouts" in metafunc.fixturenames:
        seeds = metafunc.config.getoption("--seeds", "1")
        rollouts = metafunc.config.getoption("--rollouts", 24)
        metafunc.parametrize(
            ("seed", "rollouts"), [(int(seed), rollouts) for seed in seeds.split(",")]
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "chaos" in item.path.parts:
            item.add_marker(pytest.mark.chaos)
            item.add_marker(pytest.mark.temporal)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    if missing := why_not_here():
        pytest.skip(missing)
    async with running(tmp_path_factory.mktemp("stack"), beat_s=DEATH_S) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def stack(shared: Stack) -> AsyncIterator[Stack]:
    await shared.refresh()
    yield shared
    shared.engine.let_go()
