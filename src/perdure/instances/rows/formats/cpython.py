"""CPython rows: a merged pull request with hidden tests, graded by the whole test suite.

A row names two commits. The grader runs the pull request's tests on the model's diff without its
test files. The dataset sets which paths are tests, which tests are ignored and how much memory a
process may address: by fields of the row, or by `[rows.defaults]` of a `dataset.toml`.
"""

import re
import shlex
from fnmatch import fnmatchcase

from perdure.instances import git_source
from perdure.instances.rows.formats import swebench
from perdure.instances.rows.image_rules import image_of
from perdure.instances.rows.row_fields import Row
from perdure.types import Grading, Instance, Source, SourceKind

TESTS = ("Lib/test/*",)
ADDRESS_SPACE = 32 << 30
"""Address space in bytes of each process of the test suite."""
TIMEOUT_S = 7200.0
_FILE = re.compile(rb"^diff --git a/(?P<path>.+) b/(?P=path)$", re.MULTILINE)


def to_instance(row: Row, dataset: str) -> Instance:
    """Raises: InstanceError naming row, field and fix; RetryHere (repository unreachable)."""
    base = row.text("base_commit", "name the parent of the pull request's merge")
    source = _source(row, base)
    include = row.strings("include") or TESTS
    tests, gold = _split(row, source, base, include)
    if not tests:
        raise row.wrong("merge_commit", f"it changes no path that matches {', '.join(include)}")
    return Instance(
        instance_id=row.text("instance_id", "add a name such as python__cpython-1"),
        dataset=dataset,
        data_source=row.optional_text("data_source", "cpython"),
        repo=row.text("repo", "name the repository, such as python/cpython"),
        base_commit=base,
        problem_statement=row.text("problem_statement", "add the text that the agent is given"),
        source=source,
        environment=swebench.environment_of(row, image_of),
        grading=Grading(
            protocol="eval_cmd",
            eval_cmd=_command(row),
            test_patch=tests,
            patch_exclude=row.strings("exclude") or include,
            timeout_s=TIMEOUT_S,
        ),
        gold_patch=gold,
        metadata=row.kept("merge_commit"),
    )


def _source(row: Row, base: str) -> Source:
    """The row's own source, or its image, or the commit on GitHub, in this order."""
    if row.has("source"):
        given = row.mapping("source")
        at_base = given if "commit" in given else {**given, "commit": base}
        return swebench.source_of(row.replaced(source=at_base), image_of)
    if image_of(row):
        return Source(kind=SourceKind.IMAGE)
    return Source(
        kind=SourceKind.GIT, url=f"https://github.com/{row.optional_text('repo')}", commit=base
    )


def _split(row: Row, source: Source, base: str, include: tuple[str, ...]) -> tuple[bytes, bytes]:
    """The pull request's change to tests, and the rest, which is the reference fix."""
    if row.has("diff"):
        return _split_diff(row.patch("diff"), include)
    merge = row.text("merge_commit", "name the merge of the pull request, or give its `diff`")
    if source.kind is not SourceKind.GIT or source.url is None:
        fix = "the source is not a git repository, so it lacks the merge: give the pull request's diff"
        raise row.lacks("diff", fix)
    paths = git_source.changed_paths(source.url, base, merge)
    tests = [path for path in paths if _matches(path, include)]
    rest = [path for path in paths if path not in tests]
    return (
        git_source.difference(source.url, base, merge, tests),
        git_source.difference(source.url, base, merge, rest),
    )


def _split_diff(diff: bytes, include: tuple[str, ...]) -> tuple[bytes, bytes]:
    starts = list(_FILE.finditer(diff))
    ends = [*(start.start() for start in starts[1:]), len(diff)]
    tests, rest = b"", b""
    for start, end in zip(starts, ends, strict=True):
        part = diff[start.start() : end]
        if _matches(start["path"].decode("utf-8", "surrogateescape"), include):
            tests += part
        else:
            rest += part
    return tests, rest


def _matches(path: str, globs: tuple[str, ...]) -> bool:
    """As in `git apply --include`: `*` also matches `/`."""
    return any(fnmatchcase(path, glob) for glob in globs)


def _command(row: Row) -> str:
    if row.has("FAIL_TO_PASS") or row.has("PASS_TO_PASS"):
        fix = "for lists of tests, set `data_source` to 'swe-bench' and give `test_patch` and `test_cmd`"
        raise row.refused(f"it has test lists, which the suite's exit code would ignore: {fix}")
    ignored = row.strings("ignore")
    if own := row.optional_text("test_cmd"):
        if ignored or row.has("address_space"):
            raise row.refused("`test_cmd` replaces the suite: remove `ignore` and `address_space`")
        return own
    limit = row.fields.get("address_space", ADDRESS_SPACE)
    if not isinstance(limit, int) or limit <= 0:
        raise row.wrong("address_space", f"give a number of bytes, not {limit!r}")
    options = " ".join(f"--ignore {shlex.quote(pattern)}" for pattern in ignored)
    tests = f"make test TESTOPTS={shlex.quote(options)}" if options else "make test"
    return f"./configure && prlimit --as={limit} {tests}"
