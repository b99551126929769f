"""SWE-rebench rows, versions 1 and 2: the test command and the log parser are in `install_config`.

Version 1 is graded as SWE-bench is: conda environment, install line, files of the test patch as
arguments. Version 2 has `language` and its own images, and `test_cmd` runs unchanged. Its publisher
resolves a row only if exactly the listed tests pass; Perdure allows others to pass too. The
publisher's parsers are in no package. Put its `lib/agent/log_parsers.py` next to the file of rows
to use it for languages other than Python.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perdure.instances.rows import image_rules, published_scripts
from perdure.instances.rows.formats import swebench, swebench_version_specs
from perdure.instances.rows.row_fields import Row
from perdure.types import Instance, OutputParser

PARSERS = "log_parsers.py"
READ = frozenset(
    [
        "base_image_name",
        "docker_specs",
        "env",
        "env_vars",
        "env_yml_path",
        "eval_commands",
        "install",
        "log_parser",
        "log_parsers",
        "no_use_env",
        "packages",
        "pip_packages",
        "pre_install",
        "python",
        "reqs_path",
        "test_cmd",
    ]
)
"""Known fields of `install_config`. Those not read here were used to build the image."""


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix."""
    config = Row(row.number, row.mapping("install_config"))
    if not config.fields:
        raise row.lacks("install_config", "add the object with `test_cmd` and `log_parser`")
    _check(row, config.fields)
    version_2, created = row.has("language"), row.fields.get("created_at")
    fields = {
        **row.fields,
        "data_source": row.optional_text("data_source", "swe-rebench"),
        "test_cmd": _version_2(config) if version_2 else _version_1(row, config),
        "log_parser": config.text("log_parser", "add `install_config.log_parser`"),
        "workdir": row.optional_text("workdir") or (_folder(row) if version_2 else "/testbed"),
        "image": image_rules.given(row) or image_rules.swe_rebench(row),
        "created_at": created if isinstance(created, str) else None,  # milliseconds in version 2
        "install": None,
        "env": None,
    }
    instance = swebench.to_instance(Row(row.number, fields), dataset)
    is_theirs = version_2 and row.optional_text("language").lower() != "python"
    file = row.beside(PARSERS)
    return _read_by(file, row, instance) if is_theirs and file.is_file() else instance


def _check(row: Row, config: Mapping[str, Any]) -> None:
    """Raises: InstanceError for a field that would be ignored."""
    if unknown := sorted(set(config) - READ):
        problem = f"`{unknown[0]}` is not a known field of SWE-rebench: remove it"
        raise row.wrong("install_config", problem)
    if config.get("log_parsers"):
        raise row.wrong(
            "install_config.log_parsers",
            "Perdure supports one parser per log: name it in `install_config.log_parser`",
        )


def _version_1(row: Row, config: Row) -> str:
    env = config.mapping("env_vars") or config.mapping("env")
    prepare = [
        *swebench_version_specs.ENTER,
        *(f"export {name}={shlex.quote(str(value))}" for name, value in env.items()),
        *config.lines("eval_commands"),
        *config.lines("install"),
    ]
    tests = [*_test_lines(config), *swebench_version_specs.test_files(row)]
    return published_scripts.command("\n".join(prepare), " ".join(tests))


def _version_2(config: Row) -> str:
    return published_scripts.command("set -uxo pipefail", "\n".join(_test_lines(config)))


def _test_lines(config: Row) -> tuple[str, ...]:
    lines = config.lines("test_cmd")
    if not lines:
        raise config.lacks("install_config.test_cmd", "add the command that runs the tests")
    return lines


def _folder(row: Row) -> str:
    """The workdir of version 2's images: the repository is at `/<name>`."""
    name = row.text(
        "repo", "add it as owner/name: the tree is in a folder of that name"
    ).rpartition("/")[2]
    return f"/{name}"


# --- version 2 with the publisher's own parsers ---------------------------------------------------

_DURATION = r"\s*\[\s*[\d.]+\s*m?s\s*\]\s*$|\s*\(\s*[\d.]+\s*m?s\s*\)\s*$|\s+in\s+[\d.]+\s+m?sec\b"
"""A duration in a test name, which some runners add: `test [1.34 ms]`."""
_PROGRAM = """
import enum, json, re, sys, types
from pathlib import Path

constants = types.ModuleType("lib.agent.swe_constants")
statuses = {name: name for name in ("PASSED", "FAILED", "SKIPPED", "ERROR")}
constants.TestStatus = enum.Enum("TestStatus", statuses, type=str)
for module in (types.ModuleType("lib"), types.ModuleType("lib.agent"), constants):
    sys.modules[module.__name__] = module
known = {"__name__": "log_parsers"}
exec(compile(SOURCE, "log_parsers.py", "exec"), known)
parse = known["NAME_TO_PARSER"].get(NAME) or known[NAME]
log = "".join(Path(name).read_text("utf-8", "replace") for name in sys.argv[1:3])
tests = [
    {"name": re.sub(DURATION, "", name, flags=re.I).strip(), "status": getattr(status, "value", status)}
    for name, status in parse(log).items()
]
Path(sys.argv[3]).write_text(json.dumps({"tests": tests}))
"""


def _read_by(file: Path, row: Row, instance: Instance) -> Instance:
    """The instance with a parser program that contains the publisher's file and calls it."""
    grading = instance.grading
    source, name = file.read_text(), grading.log_parser
    if not re.search(rf"^(?:def )?{re.escape(name)}\b", source, re.MULTILINE):
        raise row.wrong("install_config.log_parser", f"{PARSERS} next to the rows has no {name!r}")
    given = {"SOURCE": source, "NAME": name, "DURATION": _DURATION}
    lines = [f"{variable} = {value!r}" for variable, value in given.items()]
    parser = OutputParser(run=grading.test_cmd or "", program="\n".join(lines) + _PROGRAM)
    changes = {
        "protocol": "swepro",
        "parser": parser,
        "fail_to_pass": tuple(map(_without_duration, grading.fail_to_pass)),
        "pass_to_pass": tuple(map(_without_duration, grading.pass_to_pass)),
    }
    return instance.model_copy(update={"grading": grading.model_copy(update=changes)})


def _without_duration(test: str) -> str:
    return re.sub(_DURATION, "", test, flags=re.IGNORECASE).strip()
