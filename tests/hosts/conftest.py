"""One cluster for all tests of this folder: they follow one another as the days of a cluster do."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.hosts.host_cluster import Cluster, running
from tests.hosts.network_hosts import why_not
from tests.stack.host_requirements import why_not_here


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "hosts" in item.path.parts:
            item.add_marker(pytest.mark.chaos)
            item.add_marker(pytest.mark.temporal)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    if missing := why_not() or why_not_here():
        pytest.skip(missing)
    async with running(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
