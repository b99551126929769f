"""A model that scores patches for a request, beside the tests or instead of them."""

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, field_validator, model_validator

from perdure.types.base import Request

MOST_CRITERIA = 16
JUDGE_FIELDS = ("criteria", "temperature", "max_tokens")


class Criterion(Request):
    """One line of a rubric.

    Example:
        {"name": "minimal", "description": "The patch changes only what the fix needs", "weight": 2}
    """

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]
    description: str = Field(min_length=1, max_length=4000)
    weight: float = Field(1.0, gt=0, le=1000)


class RewardModel(Request):
    """A reward model behind HTTP (`url`), or a model of the engines that judges by a rubric (`model` and
    `criteria`). Its scores become named rewards: `reward_model` or `judge`, and `judge.<name>` for a part.

    Example:
        {"url": "http://10.0.0.5:8000/score"}
        {"model": "judge", "criteria": [{"name": "minimal", "description": "Changes only ..."}]}
    """

    url: str = ""
    """Address to which the worker posts each patch. It has no credentials."""
    model: str = ""
    """The model that judges, as an engine serves it (`perdure engines list`)."""
    criteria: tuple[Criterion, ...] = Field((), max_length=MOST_CRITERIA)
    """The rubric. The judge gives each criterion 0 to 1; the score is their weighted mean."""
    temperature: float = Field(0.0, ge=0)
    """The judge's temperature."""
    max_tokens: int = Field(8192, ge=1)
    """Most tokens of one answer of the judge."""
    timeout_s: float = Field(300.0, gt=0, le=600)
    """Seconds of one call. A longer one is retried."""
    replaces_tests: bool = False
    """Run no tests: the score, 0 to 1, is the reward, and 1 is `resolved`. If false, tests alone decide."""

    @property
    def kind(self) -> str:
        """The name of its reward."""
        return "reward_model" if self.url else "judge"

    @property
    def host(self) -> str:
        """`HOST:PORT` or `HOST` of `url`; empty without one."""
        return urlsplit(self.url).netloc.lower()

    @field_validator("url")
    @classmethod
    def _is_public(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("write http://HOST/PATH or https://HOST/PATH")
        if parts.username or parts.password or parts.query:
            raise ValueError(
                "requests are stored: leave out credentials and parameters, and set "
                "PERDURE_GRADING__REWARD_MODEL_KEY_ENV"
            )
        return url

    @field_validator("criteria")
    @classmethod
    def _names_differ(cls, criteria: tuple[Criterion, ...]) -> tuple[Criterion, ...]:
        names = [one.name for one in criteria]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ValueError(f"two criteria have the name {twice!r}")
        return criteria

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if bool(self.url) == bool(self.model):
            raise ValueError("give exactly one of `url` and `model`")
        if self.url and (of_judge := [n for n in JUDGE_FIELDS if n in self.model_fields_set]):
            raise ValueError(f"`{of_judge[0]}` belongs to a judge: leave it out, or give `model`")
        if self.model and not self.criteria:
            raise ValueError("a judge needs `criteria`: at least one name and description")
        return self
