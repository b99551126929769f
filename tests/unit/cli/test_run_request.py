"""Options become a request: run ids that join, nested fields, selected instances."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.commands.option_types import duration, share
from perdure.cli.runs.instance_selection import Selection
from perdure.cli.runs.run_request import RunOptions, build, fields_of, instances_of
from perdure.errors import ConfigurationError
from perdure.storage.local_store import LocalStore

SOURCE = Selection("rows", "rows", ("rows/a-1", "rows/a-2", "rows/b-1"), digest="d1")
OPTIONS = RunOptions(source="rows.jsonl", agent="oracle")


def test_same_command_means_the_same_run() -> None:
    """The same command has the same run id, with any concurrency, samples and limit."""
    again = replace(OPTIONS, concurrency=64, samples=3, limit=2)

    assert build(OPTIONS, SOURCE).run_id == build(again, SOURCE).run_id


@pytest.mark.parametrize(
    "change",
    [{"agent": "nop"}, {"include": ("a*",)}, {"new": True},
     {"fields": {"model": "m"}}],
    ids=str,
)  # fmt: skip
def test_another_command_means_another_run(change: dict[str, Any]) -> None:
    """Each option that changes the result changes the run id."""
    assert build(replace(OPTIONS, **change), SOURCE).run_id != build(OPTIONS, SOURCE).run_id


def test_changed_rows_mean_another_run() -> None:
    """A file with changed content does not join the run of the old content."""
    changed = replace(SOURCE, digest="d2")

    assert build(OPTIONS, changed).run_id != build(OPTIONS, SOURCE).run_id


def test_assignments_nest_and_read_json() -> None:
    """`--set a.b=1` nests; a value that does not parse as JSON is text."""
    fields = fields_of(
        ["sampling.temperature=0.7", "model=m-1", "limits.cpus=4"], {"sandbox": "local"}
    )

    assert fields == {
        "sandbox": "local",
        "sampling": {"temperature": 0.7},
        "model": "m-1",
        "limits": {"cpus": 4},
    }


@pytest.mark.parametrize(
    ("text", "seconds"), [("4h", 14400), ("1h30m", 5400), ("90s", 90), ("90", 90), ("1.5m", 90)]
)
def test_a_deadline_has_units(text: str, seconds: float) -> None:
    """Without a unit, they are seconds."""
    assert duration(text) == seconds


@pytest.mark.parametrize(("text", "found"), [("98%", 0.98), ("0.98", 0.98), ("100%", 1.0)])
def test_a_share_may_be_a_percentage(text: str, found: float) -> None:
    """`98%` and `0.98` are the same."""
    assert share(text) == found


def test_the_agent_cannot_be_assigned() -> None:
    """`--set agent=` would be ignored, so it is refused."""
    with pytest.raises(ConfigurationError, match="set the agent with --agent"):
        fields_of(["agent=nop"], {})


def test_assignment_without_a_value_is_refused() -> None:
    """`--set key` without a value is refused with the right form."""
    with pytest.raises(ConfigurationError, match="write it as KEY=VALUE"):
        fields_of(["model"], {})


def test_long_lists_stay_out_of_the_request() -> None:
    """Thousands of references go into the store, not into a workflow's input."""
    refs = tuple(f"rows/a-{n}" for n in range(201))

    request = build(OPTIONS, replace(SOURCE, refs=refs))

    assert (request.instances, request.dataset) == ((), "rows")


async def test_globs_select_instances(tmp_path: Path) -> None:
    """--include and --exclude match instance ids; --limit then cuts the list."""
    options = replace(OPTIONS, include=("a-*", "b-*"), exclude=("*-2",), limit=2)

    found, _ = await instances_of(LocalStore(str(tmp_path)), build(options, SOURCE), SOURCE)

    assert found == ["rows/a-1", "rows/b-1"]


async def test_globs_that_match_nothing_show_some_names(tmp_path: Path) -> None:
    """An empty selection is an error that shows real ids."""
    request = build(replace(OPTIONS, include=("z*",)), SOURCE)

    with pytest.raises(ConfigurationError, match="such as a-1, a-2, b-1"):
        await instances_of(LocalStore(str(tmp_path)), request, SOURCE)
