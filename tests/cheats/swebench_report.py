"""What swebench itself says about a log, from its own `get_eval_report`."""

import tempfile
from pathlib import Path

from perdure.graders.reports.log_parsers import published_names
from perdure.types import Instance

START, END, CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"


def swebench_resolves(instance: Instance, log: bytes, exit_code: int | None) -> bool:
    """Its `resolved` for this log between its markers, as its containers write it. The log holds
    Perdure's canary, which fails; a run of its own has none.

    Raises: MissingDependency; whatever its parsers raise on a log.
    """
    grading = instance.grading
    parser = "parse_log_pytest" if grading.log_parser == "pytest" else grading.log_parser
    assert parser in published_names()  # it also imports the package without what containers need
    from swebench.harness.grading import get_eval_report
    from swebench.types import TestSpec

    spec = TestSpec(
        instance_id=instance.instance_id,
        image="",
        eval_script_list=[],
        repo="",
        version="",
        FAIL_TO_PASS=list(grading.fail_to_pass),
        PASS_TO_PASS=list(grading.pass_to_pass),
        log_parser=parser,
        eval_type=grading.eval_type,
    )
    text = log.decode("utf-8", "replace")
    prediction = {"instance_id": instance.instance_id, "model_patch": "a patch"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_output.txt"
        path.write_text(f"{START}\n{text}\n{END}\n{CODE}: {exit_code}\n")
        report = get_eval_report(spec, prediction, str(path), include_tests_status=False)
    return bool(report[instance.instance_id]["resolved"])
