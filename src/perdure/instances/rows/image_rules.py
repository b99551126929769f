"""Image names of the public datasets: the row's own, or the name by its publisher's rule.

`perdure.sandboxes.image_names` decides where an image is pulled from, and its name at a provider.
"""

from collections.abc import Callable

from perdure.errors import ConfigurationError
from perdure.instances.rows.row_fields import Row

IMAGE_FIELDS = ("image", "image_name", "docker_image", "image_url")
"""Fields that may name the image; rows of Scale-SWE, SWE-smith and R2E-Gym always have one."""

Rule = Callable[[Row], str | None]


def image_of(row: Row) -> str | None:
    """The row's own image, or the one by its data source's rule or by SWE-bench's."""
    if own := given(row):
        return own
    source = row.optional_text("data_source").lower().replace("_", "-").rpartition("/")[2]
    for prefix, rule in RULES:
        if source.startswith(prefix):
            return rule(row)
    return swebench(row) if row.has("version") else None


def rule_named(name: str) -> Rule:
    """The rule for data sources that begin with `name`. Raises: ConfigurationError."""
    for prefix, rule in RULES:
        if prefix == name:
            return rule
    known = ", ".join(prefix for prefix, _ in RULES)
    raise ConfigurationError(f"no image rule {name!r}: give one of {known}, or `row`")


def given(row: Row) -> str | None:
    """The image that the row itself names."""
    return next((name for field in IMAGE_FIELDS if (name := row.optional_text(field))), None)


def swebench(row: Row) -> str | None:
    return _by_id(row, "swebench", "_1776_")


def swe_gym(row: Row) -> str | None:
    return _by_id(row, "xingyaoww", "_s_")


def swe_bench_live(row: Row) -> str | None:
    return _by_id(row, "starryzhang", "_1776_")


def swe_rebench(row: Row) -> str | None:
    return _by_id(row, "swerebench", "_1776_")


def _by_id(row: Row, owner: str, instead: str) -> str | None:
    """The image by instance id. Docker forbids `__`, which each publisher replaces differently."""
    instance_id = row.optional_text("instance_id").lower()
    if "__" not in instance_id:
        return None
    return f"docker.io/{owner}/sweb.eval.x86_64.{instance_id.replace('__', instead)}:latest"


def swe_smith(row: Row) -> str | None:
    """One image for each repository and commit: `<owner>__<repo>.<sha8>.<kind of bug>`."""
    parts = row.optional_text("instance_id").lower().rsplit(".", 2)
    if len(parts) != 3 or "__" not in parts[0]:
        return None
    repository = parts[0].replace("__", "_1776_")
    return f"docker.io/swebench/swesmith.x86_64.{repository}.{parts[1]}:latest"


def r2e_gym(row: Row) -> str | None:
    repository, commit = row.optional_text("repo_name"), row.optional_text("commit_hash")
    return f"docker.io/namanjain12/{repository}_final:{commit}" if repository and commit else None


def swe_bench_pro(row: Row) -> str | None:
    tag = row.optional_text("dockerhub_tag")
    return f"docker.io/jefzda/sweap-images:{tag}" if tag else None


def multi_swe(row: Row) -> str | None:
    owner, repository = row.optional_text("org").lower(), row.optional_text("repo").lower()
    number = row.fields.get("number")
    if not (owner and repository and number):
        return None
    return f"docker.io/mswebench/{owner}_m_{repository}:pr-{number}"


RULES: tuple[tuple[str, Rule], ...] = (
    ("swe-bench-pro", swe_bench_pro),
    ("swe-bench-live", swe_bench_live),
    ("swe-bench", swebench),
    ("swebench", swebench),
    ("swe-gym", swe_gym),
    ("swegym", swe_gym),
    ("swe-smith", swe_smith),
    ("swesmith", swe_smith),
    ("swe-rebench", swe_rebench),
    ("r2e", r2e_gym),
    ("multi-swe", multi_swe),
)
"""Rules by prefix of `data_source`; a longer prefix comes before its shorter one."""
