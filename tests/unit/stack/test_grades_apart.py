"""With `host.grades_apart`, no worker of a home grades where another runs agents."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import HostSettings, Settings
from perdure.stack.host_life import hold_role_locks
from workers import worker_process

ALL = ("workflows", "boot", "agent", "grade", "io")


def settings(home: Path, *, apart: bool) -> Settings:
    return Settings(home=home, host=HostSettings(grades_apart=apart))


@pytest.mark.parametrize(
    "workers", [[ALL], [("boot",), ("grade",)], [("grade",), ("agent", "io")]], ids=str
)
def test_agents_and_gradings_share_no_host(tmp_path: Path, workers: list[tuple[str, ...]]) -> None:
    """In one process or two, in either order, the one that would mix them does not start."""
    *first, last = workers
    apart = settings(tmp_path, apart=True)
    with ExitStack() as running:
        for roles in first:
            running.enter_context(hold_role_locks(apart, roles))

        with pytest.raises(ConfigurationError, match="PERDURE_HOST__GRADES_APART"):
            running.enter_context(hold_role_locks(apart, last))


def test_a_refused_worker_leaves_no_mark(tmp_path: Path) -> None:
    """After a worker for agents was refused, gradings go on, and another grading worker starts."""
    apart = settings(tmp_path, apart=True)
    with hold_role_locks(apart, ("grade",)):
        with pytest.raises(ConfigurationError), hold_role_locks(apart, ("agent",)):
            pass
        with hold_role_locks(apart, ("grade", "io")):
            pass


def test_agents_start_once_gradings_have_left(tmp_path: Path) -> None:
    """A host can change its purpose."""
    apart = settings(tmp_path, apart=True)
    with hold_role_locks(apart, ("grade",)):
        pass
    with hold_role_locks(apart, ("boot", "agent")):
        pass


def test_one_host_does_everything_by_default(tmp_path: Path) -> None:
    """A laptop grades beside its agents."""
    with hold_role_locks(settings(tmp_path, apart=False), ALL):
        pass


async def test_a_worker_checks_before_it_polls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m workers boot grade` ends with the reason and takes no task."""

    async def connected(**_: object) -> None:
        return None  # any use of the client would fail

    monkeypatch.setattr(worker_process, "connect", connected)

    with pytest.raises(ConfigurationError, match="on another host"):
        await worker_process.serve(settings(tmp_path, apart=True), ("boot", "grade"))
