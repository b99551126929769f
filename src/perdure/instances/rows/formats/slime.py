"""slime's rows: `prompt`, `label` and a `metadata` object with the image and the grader.

Flat fields of `metadata` win over those of `metadata.remote_env_info`. The first of these present
selects the grader, as in slime: `swepro`, `eval_cmd`, `remote_env_info.f2p_script`; then
SWE-bench's own fields.
"""

from dataclasses import replace
from typing import Any

from perdure.errors import InstanceError
from perdure.instances.rows.formats import scale_swe, swe_bench_pro, swebench
from perdure.instances.rows.image_rules import image_of
from perdure.instances.rows.row_fields import Row
from perdure.types import Grading, Instance, slugify


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix."""
    flat = _flattened(row)
    return Instance(
        instance_id=_instance_id(row, flat),
        dataset=dataset,
        data_source=flat.optional_text("data_source", "slime"),
        repo=flat.optional_text("repo"),
        base_commit=flat.optional_text("base_commit") or None,
        problem_statement=flat.optional_text("problem_statement") or _prompt(row),
        source=swebench.source_of(flat, image_of),
        environment=swebench.environment_of(flat, image_of),
        grading=_grading(flat),
        gold_patch=flat.patch("patch"),
        metadata=flat.kept("version", "difficulty"),
    )


def _flattened(row: Row) -> Row:
    metadata = row.mapping("metadata")
    remote = Row(row.number, metadata).mapping("remote_env_info")
    return replace(row, fields={**remote, **metadata})


def _instance_id(row: Row, flat: Row) -> str:
    name = flat.optional_text("instance_id") or row.optional_text("label")
    if not name.strip():
        raise row.lacks("label", "give the row an id there, or in `metadata.instance_id`")
    return slugify(name)


def _prompt(row: Row) -> str:
    """The prompt as text; for a chat, the last user message."""
    prompt = row.fields.get("prompt")
    if isinstance(prompt, list):
        said = [turn.get("content") for turn in prompt if _is_user_turn(turn)]
        prompt = said[-1] if said else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise row.lacks("metadata.problem_statement", "add the text that the agent is given")
    return prompt


def _is_user_turn(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role") == "user"


def _grading(row: Row) -> Grading:
    if row.has("swepro"):
        return swe_bench_pro.grading_of(row.replaced(**row.mapping("swepro")))
    listed = row.has("FAIL_TO_PASS") or row.has("PASS_TO_PASS")
    if row.has("eval_cmd"):
        if listed:
            raise row.refused(
                "it has `eval_cmd` and test lists, and slime would ignore the lists: remove `eval_cmd` to "
                "grade by the lists, or the lists to grade by exit code"
            )
        return swebench.eval_cmd_grading(row)
    if row.has("f2p_script"):
        return scale_swe.grading_of(row)
    if listed and row.has("test_patch"):
        return swebench.lists_grading(row)
    raise _no_grader(row)


def _no_grader(row: Row) -> InstanceError:
    if row.has("test_patch"):
        return row.refused(
            "it has `test_patch` but no slime grader (protocol mismatch): "
            "add `metadata.eval_cmd`, or SWE-bench's FAIL_TO_PASS and `version` or `test_cmd`"
        )
    return row.lacks("metadata.eval_cmd", "add the command whose exit code 0 means solved")
