"""`dataset.toml`: where the rows of a dataset come from, and how to read and grade them.

Each folder under `datasets/` has one recipe. It names rows that are published elsewhere, or the
material from which `perdure instances build` makes rows: pairs of releases, commits of a git
history, or patches of a source package.
"""

import datetime
import itertools
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    model_validator,
)

from perdure.errors import ConfigurationError
from perdure.installation import service_folder
from perdure.types import Instance, Phases, Request, Slug

FILE = "dataset.toml"
UNVERIFIED = "unverified"
FROM_ROW = "row"

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
HubName = Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")]
Commit = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]


class Pair(Request):
    """Two releases of a package, and what the tests that changed between them need."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    package: Name
    before: Name = Field(alias="from")
    after: Name = Field(alias="to")
    test_cmd: Annotated[str, StringConstraints(min_length=1)] | None = None
    """None: pytest on the test modules that the later release changes."""
    exclude_newer: datetime.date | None = None
    """The environment has no package that was published after this day. None: the day after the
    later release."""
    requires: tuple[str, ...] | None = None
    """Requirements of the tests besides the package itself. None: pytest, and the requirements that
    the package's metadata names (`needs`)."""
    python: str | None = None
    """None: chosen from the package's metadata and the day."""
    demo: bool = False
    """The demo runs this pair, because it is quick."""

    @property
    def instance_id(self) -> str:
        return f"{self.package}-{self.after}"


class Releases(Request):
    """Releases of a package, in order; each two consecutive ones are a pair."""

    package: Name
    versions: tuple[Name, ...] = Field(min_length=2)
    requires: tuple[str, ...] | None = None
    """As in `Pair`."""

    @property
    def pairs(self) -> list[Pair]:
        common = {"package": self.package, "requires": self.requires}
        ends = itertools.pairwise(self.versions)
        return [Pair.model_validate({**common, "from": old, "to": new}) for old, new in ends]


class History(Request):
    """A git repository whose commits become rows: a clone on this host, or one made of releases."""

    repository: str | None = None
    """The folder of a clone; a relative path starts at the recipe's folder."""
    package: Name | None = None
    versions: tuple[Name, ...] = ()
    """Releases of `package`, in order; each becomes a commit."""
    revision: str = "HEAD"
    """The commits are this one and its chain of first parents."""
    limit: int = Field(50, ge=1)
    """Most commits: the newest that change both tests and code."""
    requires: tuple[str, ...] | None = None
    """Requirements of the tests besides the tree. None: pytest, and the requirements that the
    tree's metadata names (`needs`)."""

    @model_validator(mode="after")
    def _one_origin(self) -> "History":
        if (self.repository is None) == (self.package is None):
            raise ValueError("give exactly one of 'repository' and 'package'")
        if (self.package is None) != (len(self.versions) < 2):
            raise ValueError("a 'package' needs two or more 'versions', a 'repository' none")
        return self


class Archive(Request):
    """A file to download."""

    url: str
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class PatchSeries(Request):
    """A Debian source package whose patches are upstream fixes."""

    package: Name
    version: str
    """Debian's version."""
    repo: str
    """The upstream repository, such as `python/cpython`."""
    upstream: Archive
    """The upstream tar file."""
    packaging: Archive
    """The tar file with `debian/patches`."""
    first: str
    """The first patch of the series to use; earlier ones are Debian's own changes."""
    install: tuple[str, ...] = ()
    test_cmd: str
    """`{modules}` is replaced by the test modules that a patch changes."""
    rows: tuple[str, ...] = Field(min_length=1)
    """Names of the patches that become rows."""


class PublishedRows(Request):
    """Published rows: a dataset of the Hugging Face hub, or files in the recipe's folder."""

    hub: HubName | None = None
    """`owner/name`. The library `datasets` loads it from the hub or from its cache."""
    config: str | None = None
    """The name of a subset on the hub."""
    split: str = "test"
    revision: Commit | Literal["unverified"] = UNVERIFIED
    """A commit of the hub's repository. `unverified`: use the newest commit."""
    files: tuple[str, ...] = ()
    """.jsonl, .json or .parquet files in the recipe's folder."""
    format: str
    """The `data_source` of rows that name none. It selects the reader and the grader."""
    image: str = FROM_ROW
    """`row`: each row names its image or its source. Otherwise a rule of `rows/image_rules.py`."""
    defaults: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields for rows that lack them, such as `ignore = [...]` of CPython's flaky tests."""
    graders: tuple[str, ...] = ("swebench",)
    """The grading protocols that are allowed; a row that selects another one is refused."""

    @model_validator(mode="after")
    def _one_origin(self) -> "PublishedRows":
        if (self.hub is None) == (not self.files):
            raise ValueError("give exactly one of 'hub' and 'files'")
        return self


class Paths(Request):
    """Globs for the paths of a model's diff; `*` also matches `/`."""

    include: tuple[str, ...] = ()
    """Only matching paths are graded; all paths if empty."""
    exclude: tuple[str, ...] = ()
    """Matching paths are dropped."""


class Recipe(Request):
    """The content of a `dataset.toml`.

    Example:
        name = "cpython"
        description = "Fixes of CPython with their regression tests."
        timeout_s = 3600
        [rows]
        hub = "pcmoritz/cpython_dataset"
        split = "train"
        format = "cpython"
        graders = ["eval_cmd"]
        [patch]
        exclude = ["Lib/test/*"]
        [phases.grade.limits]
        memory_mb = 32768
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    name: Slug
    description: str = ""
    rows: PublishedRows | None = None
    pairs: tuple[Pair, ...] = Field(default=(), alias="pair")
    releases: tuple[Releases, ...] = ()
    histories: tuple[History, ...] = Field(default=(), alias="history")
    patches: PatchSeries | None = None
    counted: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """Instance id -> the numbers of FAIL_TO_PASS and PASS_TO_PASS tests that its author counted. A
    build reports a difference."""
    patch: Paths = Paths()
    """Which paths of a model's diff are graded, for rows that do not say."""
    timeout_s: float | None = Field(None, gt=0)
    """Time limit of the test run, for rows that set none."""
    phases: Phases = Phases()
    """Limits of the sandboxes, for rows that set none."""

    @model_validator(mode="after")
    def _one_origin(self) -> "Recipe":
        given = (self.rows, self.pairs, self.releases, self.histories, self.patches)
        if sum(bool(one) for one in given) != 1:
            names = "[rows], [[pair]], [[releases]], [[history]] and [patches]"
            raise ValueError(f"give exactly one of {names}")
        return self

    def apply_defaults(self, instance: Instance) -> Instance:
        """The instance with this dataset's defaults. Values of the row itself win."""
        grading = instance.grading
        changes: dict[str, object] = {}
        if self.timeout_s is not None and "timeout_s" not in grading.model_fields_set:
            changes["timeout_s"] = self.timeout_s
        if not grading.patch_include and not grading.patch_exclude:
            changes["patch_include"] = self.patch.include
            changes["patch_exclude"] = self.patch.exclude
        found = instance.model_copy(update={"grading": grading.model_copy(update=changes)})
        if instance.phases == Phases():
            found = found.model_copy(update={"phases": self.phases})
        return found


def load_recipe(path: str | Path) -> Recipe:
    """Read the recipe in a `dataset.toml`, or in the folder that contains one.

    Raises: ConfigurationError naming the file, the entry and the field.
    """
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        recipe = Recipe.model_validate(tomllib.loads(file.read_text()))
    except FileNotFoundError:
        raise ConfigurationError(f"no recipe at {file}: give a folder with a {FILE}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{file} is not valid TOML: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
        told = f"`{where.lstrip('.')}`: {first['msg']}" if where else first["msg"]
        raise ConfigurationError(f"{file}: {told}") from error
    names = [pair.instance_id for pair in recipe.pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"{file}: two pairs make {name!r}; keep one of them")
    return recipe


def find_recipe(name: str) -> Path | None:
    """The folder with a recipe: the path `name`, or one of this copy's `datasets/`."""
    for folder in (Path(name), service_folder() / "datasets" / name):
        if (folder / FILE).is_file():
            return folder
    return None


def recipe_folder(name: str) -> Path:
    """As `find_recipe`. Raises: ConfigurationError with the names of all recipes."""
    found = find_recipe(name)
    if found is None:
        raise ConfigurationError(
            f"no recipe {name!r}: give one of {', '.join(recipe_names())}, or a folder with a "
            f"{FILE}"
        )
    return found


def recipe_names() -> list[str]:
    """Names of the recipes of this copy's `datasets/`, in lexical order."""
    return sorted(file.parent.name for file in (service_folder() / "datasets").glob(f"*/{FILE}"))
