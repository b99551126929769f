"""Tests of the sandbox contract that exercise shared code run once in `make test`.

Some providers run commands with the same code: the guest inside a remote sandbox, or the keeper on
this host. A contract class that sets `runs_commands_as` names the class that tests this code. Then
only `make test-all` runs the tests of `COMMANDS` for it; `make test` runs its other tests.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.service_harness import MODAL, SERVICES, Bench, Service, benched

settings.load_profile("ci")  # the same examples in each run

COMMANDS = {
    "test_exit_codes_are_exit_codes",
    "test_death_by_signal_is_no_exit",
    "test_unknown_exec_id_is_not_found",
    "test_second_start_runs_nothing",
    "test_exec_id_with_other_argv_is_refused",
    "test_results_stay",
    "test_wait_gives_up_in_time",
    "test_many_at_once",
    "test_missing_program_fails",
    "test_timeout_kills_the_whole_tree",
    "test_a_time_limit_moves_later",
    "test_sigkill_reaches_the_whole_tree",
    "test_sigkill_after_the_end_reaches_what_was_left",
    "test_gentle_signal_can_be_handled",
    "test_background_child_does_not_hold_the_result",
    "test_too_much_output_is_killed",
    "test_output_is_readable_by_offset_while_it_grows",
    "test_output_that_is_not_there_yet_is_waited_for",
    "test_streams_are_separate_bytes",
    "test_stdin_is_given_and_ends",
    "test_environment_and_folder",
    "test_any_variable_can_be_set",
    "test_check_raises_on_failure",
}
"""Tests of the sandbox contract about commands: their starts, ends, output and signals."""


@pytest.fixture(
    params=[
        pytest.param(service, marks=[pytest.mark.longer] if service is MODAL else [])
        for service in SERVICES
    ],
    ids=lambda service: service.name,
)
def service(request: pytest.FixtureRequest) -> Service:
    """Each service. A file about one service overrides this."""
    found: Service = request.param
    return found


@pytest.fixture
async def bench(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Bench]:
    async with benched(service, tmp_path, monkeypatch) as bench:
        yield bench


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        cls = getattr(item, "cls", None)
        if getattr(cls, "runs_commands_as", "") and item.name in COMMANDS:
            item.add_marker(pytest.mark.longer)
