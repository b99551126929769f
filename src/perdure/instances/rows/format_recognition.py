"""Recognizes the format of a row that names no `data_source`, and refuses fields that its format
would ignore but another format grades by.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from perdure import variant_registry
from perdure.errors import InstanceError
from perdure.instances.rows.formats import swe_gym
from perdure.instances.rows.row_fields import Row


class Format(NamedTuple):
    """A public format, with the fields that distinguish its rows from others."""

    title: str
    marks: tuple[str, ...]
    """Only its rows have these fields, and they decide the grading; one of them is enough."""
    needs: tuple[str, ...]
    """Fields that every row of the format has."""


LISTS = ("instance_id", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS")

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "swebench": Format("SWE-bench", (), LISTS),
        "swe-bench-multimodal": Format("SWE-bench Multimodal", ("image_assets",), LISTS),
        "swe-bench-pro": Format(
            "SWE-bench Pro",
            ("before_repo_set_cmd", "selected_test_files_to_run"),
            ("instance_id", "problem_statement", "patch", "fail_to_pass", "before_repo_set_cmd"),
        ),
        "swe-gym": Format("SWE-Gym", ("test_script", "setup_script"), (*LISTS, "test_script")),
        "swe-smith": Format(
            "SWE-smith", (), ("instance_id", "patch", "FAIL_TO_PASS", "image_name")
        ),
        "swe-rebench": Format("SWE-rebench", ("install_config",), (*LISTS, "install_config")),
        "r2e-gym": Format(
            "R2E-Gym",
            ("expected_output_json", "parsed_commit_content"),
            ("repo_name", "commit_hash", "docker_image", "expected_output_json"),
        ),
        "scale-swe": Format(
            "Scale-SWE", ("f2p_patch", "f2p_script"), ("instance_id", "parent_commit", "f2p_patch")
        ),
        "multi-swe-bench": Format(
            "Multi-SWE-bench",
            ("fix_patch", "f2p_tests"),
            ("org", "repo", "number", "base", "fix_patch", "test_patch"),
        ),
        "cpython": Format(
            "CPython",
            ("merge_commit",),
            ("instance_id", "repo", "base_commit", "merge_commit", "problem_statement"),
        ),
        "slime": Format("slime", ("swepro", "remote_env_info"), ("prompt", "metadata")),
    }
)
"""Name in `variant_registry.ROWS` -> format."""

ALIKE = {
    "swe-bench": "swebench",
    "swegym": "swe-gym",
    "swesmith": "swe-smith",
    "git-history": "swebench",
    "release-pair": "swebench",
}
"""Other names in `variant_registry.ROWS` -> the format's name in FORMATS."""


def recognised(row: Row) -> str:
    """The format's name in `variant_registry.ROWS`, found from the row's fields.

    Raises: InstanceError when no format or more than one fits.
    """
    marked = [name for name, format_ in FORMATS.items() if _mark_of(row, format_)]
    if _is_slime(row):
        marked = ["slime"]
    elif row.optional_text("repo").startswith("swesmith/"):
        marked = ["swe-smith"]
    elif not marked and swe_gym.is_published(row):
        marked = ["swe-gym"]
    if len(marked) > 1:
        both = " and ".join(
            f"`{_mark_of(row, FORMATS[n])}` of {FORMATS[n].title}" for n in marked[:2]
        )
        raise row.refused(f"it has {both}: name its format in `data_source`, such as {marked[0]!r}")
    return marked[0] if marked else _nearest(row)


def read_instance_id(row: Row) -> str:
    """The instance id, if the row's format takes it from the field `instance_id`; otherwise empty,
    because only the conversion gives it."""
    try:
        named = row.optional_text("data_source")
        name = variant_registry.data_source_named(named) if named else recognised(row)
        own = FORMATS.get(ALIKE.get(name or "", name or ""))
        takes_it = (
            own is not None and "instance_id" in own.needs and name not in variant_registry.HANDLERS
        )
        return row.optional_text("instance_id") if takes_it else ""
    except InstanceError:
        return ""


def refuse_ambiguous_format(row: Row, name: str) -> None:
    """Refuse a field that this format would ignore but by which another format grades.

    Raises: InstanceError naming both formats.
    """
    own = ALIKE.get(name, name)
    for other, format_ in FORMATS.items():
        mark = _mark_of(row, format_)
        if mark and own != other and own in FORMATS and own != "slime":
            raise row.refused(
                f"it has `{mark}`, a field of {format_.title} that {FORMATS[own].title} would "
                f"ignore: set `data_source` to {other!r}, or remove the field"
            )


def _mark_of(row: Row, format_: Format) -> str:
    return next((mark for mark in format_.marks if row.has(mark)), "")


def _is_slime(row: Row) -> bool:
    """`metadata` has a grader or an image, or the row has no `instance_id`."""
    if not row.has("metadata"):
        return False
    inside = row.fields["metadata"]
    graders = ("swepro", "eval_cmd", "remote_env_info", "image", "image_url")
    return not row.has("instance_id") or (
        isinstance(inside, Mapping) and any(inside.get(name) for name in graders)
    )


def _rows_in(value: object) -> str:
    """What a field contains, if that is whole rows or predictions; otherwise empty."""
    one = next(iter(value), None) if isinstance(value, list) else value
    if not isinstance(one, Mapping):
        return ""
    if "model_patch" in one:
        return "predictions (`perdure grade SOURCE -p FILE` grades them)"
    return "rows" if "problem_statement" in one else ""


def _nearest(row: Row) -> str:
    """The unmarked format with the largest share of its fields present, at least half. A row with
    its own `eval_cmd` needs no lists of tests."""
    if all(map(row.has, ("instance_id", "problem_statement", "eval_cmd"))):
        return "swebench"

    def share(name: str) -> float:
        needs = FORMATS[name].needs
        return sum(map(row.has, needs)) / len(needs)

    unmarked = [name for name, format_ in FORMATS.items() if not format_.marks]
    nearest = max(unmarked, key=share)
    if share(nearest) >= 1 / 2:
        return nearest
    raise _unknown(row, max(FORMATS, key=share))


def _unknown(row: Row, nearest: str) -> InstanceError:
    if "model_patch" in row.fields:
        return row.refused("it is a prediction: `perdure grade SOURCE -p FILE` grades such a file")
    if inside := next((_rows_in(one) for one in row.fields.values() if _rows_in(one)), ""):
        return row.refused(f"it contains {inside}: make each one an entry of the file's list")
    has = ", ".join(f"`{name}`" for name in list(row.fields)[:8]) or "none"
    lacks = ", ".join(f"`{name}`" for name in FORMATS[nearest].needs if not row.has(name))
    return row.refused(
        f"its format is unknown (fields: {has}). The nearest is {FORMATS[nearest].title} "
        f"({nearest!r}), for which it lacks {lacks}. Name a format in `data_source`, or add your own "
        "handler"
    )
