"""What a person sees while something runs: colours, a voice in silence, links."""

import threading

import pytest

from perdure.cli import console
from perdure.cli.runs.run_tables import View, bar_style
from perdure.cli.runs.run_text import progress_line
from perdure.cli.temporal_connection import failed_link
from perdure.types import RunStatus
from tests.stack.wait_until import PATIENCE_S


@pytest.mark.parametrize(
    ("state", "by_status", "style"),
    [
        ("running", {"graded": 3}, "green"),
        ("done", {"graded": 3, "cancelled": 1}, "green"),
        ("running", {"graded": 3, "failed": 1}, "red"),
        ("attention", {}, "yellow"),
        ("paused", {"graded": 1}, "yellow"),
        ("no worker answers", {}, "yellow"),
    ],
)
def test_the_bar_is_coloured_by_how_the_run_is(
    state: str, by_status: dict[str, int], style: str
) -> None:
    """Green goes well, red has rollouts without a verdict, yellow waits."""
    progress = RunStatus(run_id="r", state=state, total=9, by_status=by_status)

    assert bar_style(View(progress, [], 1.0)) == style


def test_no_rollout_of_a_closed_run_is_called_waiting() -> None:
    """Nothing will start the rest, so it is unfinished."""
    seen = RunStatus(run_id="r", state="running", total=9, done=2, running=3)
    ended = RunStatus(run_id="r", state="terminated", total=9, done=2)

    assert progress_line(seen) == "r: 2 done, 3 running, 4 waiting of 9 (running)"
    assert progress_line(ended) == "r: 2 done, 7 unfinished of 9 (terminated)"


def test_a_long_step_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As long as nothing else is said, a line names the step, again and again."""
    monkeypatch.setattr(console, "SILENCE_S", 0.01)
    spoken, said = threading.Semaphore(0), console.say

    def heard(text: str) -> None:
        said(text)
        spoken.release()

    monkeypatch.setattr(console, "say", heard)
    with console.print_when_silent("still building"):
        for _ in range(2):
            assert spoken.acquire(timeout=PATIENCE_S)

    assert capsys.readouterr().err.startswith("  still building (")


def test_the_link_to_what_failed_is_a_query_of_the_web_ui() -> None:
    """Without a web UI there is none."""
    link = failed_link("http://127.0.0.1:8233", "default", "try-1")

    assert link == (
        "http://127.0.0.1:8233/namespaces/default/workflows"
        "?query=PerdureRun+%3D+%27try-1%27+AND+ExecutionStatus+%3D+%27Failed%27"
    )
    assert failed_link("", "default", "try-1") == ""
