"""Finds twins in the tests that releases and SWE-bench rows add, without running anything."""

import json
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from perdure.graders.twins.expectation_mutation import Candidate, candidates
from perdure.graders.twins.parsed_test_file import Source
from perdure.graders.twins.patch_lines import added_lines
from perdure.graders.twins.twin_lint import Lint, lint
from perdure.instances import base_trees, host_git
from perdure.instances.recipes import path_purpose
from perdure.instances.recipes.dataset_recipe import Pair, load_recipe, recipe_folder

WANTED = 5
"""Calibration chooses this many twins of a function."""
CACHE = Path(".perdure/bench/sdists")
RELEASES = (
    "apispec-6.1.0 attrs-22.2.0 boltons-24.0.0 cachetools-5.3.0 click-8.1.0 jsonschema-4.18.1 "
    "markdown-3.5 packaging-22.0 structlog-23.2.0 webargs-8.3.0 werkzeug-2.3.0"
)
"""Rows of release-pairs that change many tests, each of a package that first-steps lacks."""


@dataclass(frozen=True)
class Shown:
    """What a reader of one run sees of a line, and the texts it could be exchanged for."""

    source: Source
    text: bytes
    neighbors: tuple[Candidate, ...]


@dataclass(frozen=True)
class TwinCase:
    """A twin, as each of its two runs shows it."""

    row: str
    package: str
    """Rows of one package share tests, so a judge must not learn from one about another."""
    strong: bool
    original: Shown
    twin: Shown


def release_pairs() -> list[Pair]:
    listed = load_recipe(recipe_folder("release-pairs"))
    more = (pair for one in listed.releases for pair in one.pairs)
    first = load_recipe(recipe_folder("first-steps")).pairs
    return [*first, *(pair for pair in more if pair.instance_id in RELEASES.split())]


def pair_cases(pair: Pair, most: int) -> list[TwinCase]:
    with TemporaryDirectory() as folder:
        old, new = Path(folder, "old"), Path(folder, "new")
        base_trees.unpack(_sdist(f"{pair.package}=={pair.before}"), old, strip=1)
        base_trees.unpack(_sdist(f"{pair.package}=={pair.after}"), new, strip=1)
        host_git.commit_all(old)
        paths = [path for path in host_git.changed_paths(old, new) if path_purpose.is_test(path)]
        sources = _sources(new, host_git.diff(old, new, paths))
    return _cases(pair.instance_id, pair.package, sources, most)


def row_cases(line: bytes, most: int) -> list[TwinCase]:
    """`line`: a SWE-bench row whose `source` is an sdist."""
    row = json.loads(line)
    requirement = row["source"]["requirement"]
    with TemporaryDirectory() as folder:
        tree, patch = Path(folder, "tree"), Path(folder, "test.patch")
        base_trees.unpack(_sdist(requirement), tree, strip=1)
        patch.write_bytes(row["test_patch"].encode())
        host_git.start(tree)
        host_git.git(tree, "apply", str(patch))
        sources = _sources(tree, patch.read_bytes())
    return _cases(row["instance_id"], requirement.split("==")[0], sources, most)


def _sdist(requirement: str) -> bytes:
    file = CACHE / f"{requirement}.tar.gz"
    if not file.exists():
        data = base_trees.download_sdist(requirement).data
        CACHE.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return file.read_bytes()


def _sources(tree: Path, patch: bytes) -> list[Source]:
    found = []
    for path, added in added_lines(patch).items():
        if path.endswith(".py"):
            with suppress(ValueError):  # Python that this interpreter cannot parse
                found.append(Source(path, (tree / path).read_bytes(), added))
    return found


def _cases(row: str, package: str, sources: list[Source], most: int) -> list[TwinCase]:
    """At most `most` strong and as many weak twins, drawn at random with a fixed seed."""
    found: dict[Lint, list[tuple[Source, Candidate]]] = {kind: [] for kind in Lint}
    for source in sources:
        for function in source.functions:
            if not source.added.intersection(range(function.first, function.last + 1)):
                continue
            by: dict[Lint, list[tuple[Source, Candidate]]] = {kind: [] for kind in Lint}
            for candidate in candidates(source, function):
                by[lint(source, candidate)[0]].append((source, candidate))
            for kind in Lint:
                found[kind] += by[kind][:WANTED]
    cases = []
    for kind in (Lint.CLEAN, Lint.WEAK):
        for source, one in Random(row).sample(found[kind], min(most, len(found[kind]))):
            original, twin = (shown(source, one, text) for text in (one.before, one.after))
            if original.neighbors and twin.neighbors:
                cases.append(TwinCase(row, package, kind is Lint.CLEAN, original, twin))
    return cases


def shown(source: Source, candidate: Candidate, text: bytes) -> Shown:
    """The file with `text` as the candidate's line."""
    return _shown(source, candidate.function.first, candidate.line, text)


@cache
def _shown(source: Source, first: int, number: int, text: bytes) -> Shown:
    lines = source.data.split(b"\n")
    lines[number - 1] = text
    changed = Source(source.path, b"\n".join(lines), frozenset((number,)))
    function = next(one for one in changed.functions if one.first == first)
    return Shown(changed, text, tuple(candidates(changed, function)))
