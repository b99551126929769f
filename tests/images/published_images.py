"""Three rows, and images in their publishers' layouts, each with the fix in its history.

- SWE-bench: a real row of schema 5, as it is. /testbed with an environment that `conda activate testbed`
  enters; a stub of ours stands in for conda, which Debian lacks.
- SWE-bench Pro: a real row. /app with the solution's commit in `.git`. Our repository has other commit
  ids, so they are replaced in the row; the scripts beside it are ours, in the publisher's form.
- R2E-Gym: no real row can be had, so this one is made, of a real fix, in the publisher's format:
  /testbed/.venv, /r2e_tests, and results and fix beside them.

Each tree is the release nearest to the row's base, as a git host is not needed for that. Tests run with
Debian's Python and pytest.
"""

import ast
import json
import os
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perdure.instances import base_trees, uv_program

DATA = Path(__file__).resolve().parents[3] / "shared/data/tasks"
FILES = ("swebench_rows.jsonl", "swebench_pro_rows.jsonl", "swebench_sdist.jsonl")
SWE_BENCH = "marshmallow-code__marshmallow-1252"
PRO = "instance_ansible__ansible-12734fa21c08a0ce8c84e533abdc560db2eb1955-v7eee2454f617569fd6889f2211f75bc02a35f9f8"
R2E_OF = "marshmallow-code__marshmallow-1359"
CUT = {
    "[required-Missing": " data for required field.]",
    "[null-Field": " may not be null.]",
    "[custom-Custom": " error message.]",
    "[validator_failed-Invalid": " value.]",
}
RECORD = "pushed.json"
DATES = {"GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z"}

CONDA = """\
# A stand-in for conda's script: it knows one environment.
conda() { [ "$1" = activate ] && PATH="/opt/miniconda3/envs/$2/bin:$PATH"; }
"""
RUN_SCRIPT = """\
#!/bin/bash
set -e
run_selected_tests() {
  cd /app
  export PYTHONPATH=/app/lib:/app/test/lib:/app/test:$PYTHONPATH
  for file in "$@"; do python -m pytest "$file" -v --tb=short --no-header || true; done
}
IFS=',' read -r -a files <<<"$1"
run_selected_tests "${files[@]}"
"""
PARSER = """\
import json, re, sys
from pathlib import Path

found = re.findall(r"^(\\S+::\\S+) (PASSED|FAILED|SKIPPED|ERROR)\\b", Path(sys.argv[1]).read_text(), re.M)
tests = [{"name": name, "status": status} for name, status in found]
Path(sys.argv[3]).write_text(json.dumps({"tests": tests}))
"""
VENV = (
    "RUN python3 -m venv --without-pip --system-site-packages {where} && echo /testbed/src >{where}/lib/python3.11/site-packages/src.pth"
    " && printf '#!{where}/bin/python\\nimport pytest\\nraise SystemExit(pytest.console_main())\\n'"
    " >{where}/bin/pytest && chmod +x {where}/bin/pytest\n"
)
"""An environment over Debian's packages, with the tree and a pytest of its own."""


@dataclass(frozen=True)
class Published:
    """A row, the folder that its image is built from, and what only its fix and its tests have."""

    row: Mapping[str, Any]
    image: str
    context: str
    """The folder with its Containerfile."""
    workdir: str
    fix: str
    test: str


def why_not() -> str:
    """Empty, or which rows are not here."""
    missing = [name for name in FILES if not (DATA / name).exists()]
    return f"the task data is not here: {', '.join(missing)}" if missing else ""


def made_before(folder: Path) -> list[Published]:
    """What `all_of` made in the folder and `keep` recorded; empty: nothing yet."""
    record = folder / RECORD
    return [Published(**one) for one in json.loads(record.read_text())] if record.exists() else []


def keep(folder: Path, made: Sequence[Published]) -> None:
    """Record that the images are in their registry."""
    (folder / RECORD).write_text(json.dumps([asdict(one) for one in made]))


def all_of(base: str, folder: Path) -> list[Published]:
    """Contexts over the image `base`, and `rows.jsonl` with `run_scripts/`, in a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = [_swe_bench(base, folder), _pro(base, folder), _r2e(base, folder)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one.row) + "\n" for one in made))
    scripts = folder / "run_scripts" / PRO
    scripts.mkdir(parents=True)
    (scripts / "run_script.sh").write_text(RUN_SCRIPT)
    (scripts / "parser.py").write_text(PARSER)
    return made


def _swe_bench(base: str, folder: Path) -> Published:
    row, context = _row(FILES[0], SWE_BENCH), folder / "swe-bench"
    tree = _tree("marshmallow==2.19.4", context / "testbed")
    commits = _history(tree, row, tree)
    _git(tree, "tag", "2.19.5", commits.fix)
    _git(tree, "reset", "-q", "--hard", commits.base)
    (context / "activate").write_text(CONDA)
    environment = VENV.format(where="/opt/miniconda3/envs/testbed")
    lines = f"COPY activate /opt/miniconda3/bin/activate\n{environment}COPY testbed /testbed\n"
    _containerfile(context, base, lines, "/testbed")
    image = f"docker.io/swebench/sweb.eval.x86_64.{SWE_BENCH.replace('__', '_1776_')}:latest"
    return Published(row, image, str(context), "/testbed", "ms_notz", "3-digit only microseconds")


def _pro(base: str, folder: Path) -> Published:
    row, context = _row(FILES[1], PRO), folder / "pro"
    tree = _tree("ansible-core==2.12.0b1", context / "app")
    _take_out_later_change(tree / "lib/ansible/parsing/yaml/dumper.py")
    _apply(tree, row["patch"], "-R", "--include=lib/*")
    _apply(tree, row["test_patch"], "-R")
    commits = _history(tree, row, tree)
    _git(tree, "checkout", "-q", commits.base)
    _containerfile(context, base, "COPY app /app\n", "/app")
    tag = f"ansible.ansible-{PRO.removeprefix('instance_')}"
    solution = row["before_repo_set_cmd"].splitlines()[-1].split()[2]
    text = json.dumps({**row, "dockerhub_tag": tag})
    text = text.replace(row["base_commit"], commits.base).replace(
        f"git checkout {solution}", f"git checkout {commits.fix}"
    )
    image = f"docker.io/jefzda/sweap-images:{tag}"
    return Published(
        json.loads(text),
        image,
        str(context),
        "/app",
        "represent_undefined",
        "_dump_string(undefined_object",
    )


def _r2e(base: str, folder: Path) -> Published:
    given, context = _row(FILES[2], R2E_OF), folder / "r2e"
    tree = _tree("marshmallow==3.0.0", context / "testbed")
    source, tests = "src/marshmallow/fields.py", "tests/test_fields.py"
    before = (tree / source).read_text()
    commits = _history(tree, given, tree)
    after, code = (tree / source).read_text(), (tree / tests).read_text()
    _git(tree, "reset", "-q", "--hard", commits.base)
    ids = [name for field in ("FAIL_TO_PASS", "PASS_TO_PASS") for name in _list(given[field])]
    expected = {".".join(_whole(name).split("::")[1:]): "PASSED" for name in ids}
    change = {
        "header": {"file": {"path": source}, "misc_line": None},
        "old_file_content": before,
        "new_file_content": after,
    }
    image = f"namanjain12/marshmallow_final:{commits.fix}"
    row = {
        "repo_name": "marshmallow",
        "docker_image": image,
        "commit_hash": commits.fix,
        "parsed_commit_content": json.dumps({"file_diffs": [change]}),
        "execution_result_content": json.dumps(
            {"test_file_names": ["test_1.py"], "test_file_codes": [code]}
        ),
        "expected_output_json": json.dumps(expected),
        "problem_statement": f"[ISSUE]\n{given['problem_statement']}\n[/ISSUE]",
        "prompt": "",
    }
    (context / "r2e_tests").mkdir()
    (context / "r2e_tests/test_1.py").write_text(code)
    (tree / "r2e_tests").symlink_to("/r2e_tests")
    (tree / "run_tests.sh").write_text(".venv/bin/python -W ignore -m pytest -rA r2e_tests\n")
    (tree / "parsed_commit.json").write_text(row["parsed_commit_content"])
    (tree / "expected_test_output.json").write_text(row["expected_output_json"])
    environment = VENV.format(where="/testbed/.venv")
    lines = f"COPY r2e_tests /r2e_tests\nCOPY testbed /testbed\n{environment}"
    _containerfile(context, base, lines, "/testbed")
    full = f"docker.io/{image}"
    return Published(
        row, full, str(context), "/testbed", "self.root.opts", "datetime_list_inner_format"
    )


# -- trees ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Commits:
    base: str
    fix: str


def _tree(requirement: str, tree: Path) -> Path:
    """A released sdist; for ansible-core there is no wheel, so uv reads its metadata by building it."""
    command = ["pip", "compile", "-", "--no-deps", "--format", "pylock.toml", "-q"]
    done = uv_program.run(command, requirement.encode())
    assert done.returncode == 0, done.stderr.decode()
    sdist = tomllib.loads(done.stdout.decode())["packages"][0]["sdist"]
    base_trees.unpack(base_trees.download(sdist["url"], sdist["hashes"]["sha256"]), tree, strip=1)
    return tree


def _take_out_later_change(file: Path) -> None:
    """The release lacks a branch for Python 2 that the row's base still had."""
    new = "    return yaml.representer.SafeRepresenter.represent_binary(self, binary_type(data))\n"
    old = f"    if PY3:\n    {new}    else:\n    {new.replace('binary(self', 'str(self')}"
    text = file.read_text().replace(new, old)
    file.write_text(
        text.replace("import text_type, binary_type", "import PY3, binary_type, text_type")
    )


def _history(repository: Path, row: Mapping[str, Any], tree: Path) -> Commits:
    """The base, and on it the fix with its tests, which is what is checked out."""
    _git(repository, "init", "-q", "-b", "main")
    _git(repository, "add", "-A", "-f")
    _git(repository, "commit", "-q", "-m", "base")
    base = _git(repository, "rev-parse", "HEAD")
    _apply(tree, row["patch"])
    _apply(tree, row["test_patch"])
    _git(repository, "add", "-A", "-f")
    _git(repository, "commit", "-q", "-m", "the fix")
    return Commits(base, _git(repository, "rev-parse", "HEAD"))


def _git(tree: Path, *arguments: str) -> str:
    argv = ["git", "-c", "user.name=u", "-c", "user.email=u@x", "-c", "gc.auto=0", *arguments]
    done = subprocess.run(
        argv, cwd=tree, env={**os.environ, **DATES}, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _apply(tree: Path, patch: str, *options: str) -> None:
    """Outside of any repository, so that no path is skipped silently."""
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    git = ["git", "apply", *options, "-"]
    inside = ["env", "GIT_DIR=/nonexistent", *git] if (tree / ".git").exists() else git
    subprocess.run(inside, cwd=tree, env=env, input=patch, text=True, check=True)


def _containerfile(context: Path, base: str, lines: str, workdir: str) -> None:
    (context / "Containerfile").write_text(f"FROM {base}\n{lines}WORKDIR {workdir}\n")


# -- rows -----------------------------------------------------------------------------------------


def _row(file: str, instance_id: str) -> dict[str, Any]:
    rows = (json.loads(line) for line in (DATA / file).read_text().splitlines())
    found: dict[str, Any] = next(row for row in rows if row["instance_id"] == instance_id)
    return found


def _whole(name: str) -> str:
    """SWE-bench cuts a name at its first space, R2E-Gym does not."""
    return next((name + rest for cut, rest in CUT.items() if name.endswith(cut)), name)


def _list(value: Any) -> list[str]:
    return list(ast.literal_eval(value)) if isinstance(value, str) else list(value)
