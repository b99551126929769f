"""SWE-Gym rows: SWE-bench's schema with lower-case ids, its own images, and ready test scripts."""

import re

from perdure.instances.rows import images, swebench
from perdure.instances.rows.fields import Row
from perdure.types import Instance

PREAMBLE = re.compile(r"^(#!.*|set .*|cd .*|source .*|conda activate .*|\s*)$")


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix."""
    test_cmd = row.optional_text("test_cmd") or _command(row)
    fields = {
        **row.fields,
        "test_cmd": test_cmd,
        "data_source": row.optional_text("data_source", "swe-gym"),
        "image": row.optional_text("image") or images.swe_gym(row),
    }
    return swebench.to_instance(Row(row.number, fields), dataset)


def _command(row: Row) -> str:
    """The command that `test_script` runs after it has entered the repository and its environment."""
    script = row.text("test_script", "add it, or the command that runs the tests as `test_cmd`")
    lines = [line for line in script.splitlines() if not PREAMBLE.match(line)]
    if not lines:
        raise row.wrong("test_script", "it runs no test command; give `test_cmd`")
    return swebench.in_conda("\n".join(lines), script)
