"""Computes the cost of tokens from a TOML file of prices, in dollars per million tokens.

Example:
    ["gpt-5*"]          # a glob for the model's name; the first that matches is used
    input = 1.25
    cached = 0.125      # prompt tokens read from the provider's cache; default: input
    output = 10.0
"""

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from perdure.episodes.episode import ModelUsage, models_of
from perdure.errors import ConfigurationError
from perdure.reports.rollout_facts import RolloutFacts
from perdure.types import Price, price_of


@dataclass(frozen=True)
class Prices:
    """Prices by glob of the model's name."""

    by_model: Mapping[str, Price]

    def of(self, *names: str) -> Price | None:
        """The price of a model with any of these names; None if the file has none."""
        return price_of(self.by_model, *names)

    def of_usage(self, usage: ModelUsage) -> Price | None:
        """The price by the name of the model that answered, otherwise by the requested name."""
        return self.of(usage.model) or self.of(usage.asked_model)

    def costs(self, rollouts: Iterable[RolloutFacts]) -> list[float]:
        """The cost in dollars of each rollout whose token counts are known."""
        return [self._cost(one) for one in rollouts if _has_usage(one)]

    def _cost(self, rollout: RolloutFacts) -> float:
        """The cost of all its model calls, including discarded attempts, the judge and the user.

        A model without a price counts as free; `missing` names it.
        """
        return math.fsum(
            price.of(one.prompt_tokens, one.cached_tokens, one.sampled_tokens)
            for one in rollout.all_usage
            if (price := self.of_usage(one)) is not None
        )

    def missing(self, rollouts: Iterable[RolloutFacts]) -> list[str]:
        """The models that answered and have no price in the file."""
        used = (one for rollout in rollouts for one in rollout.all_usage)
        without = {one.model for one in used if self.of_usage(one) is None}
        return sorted(models_of(1, without, "")) if without else []


def _has_usage(rollout: RolloutFacts) -> bool:
    """Whether its tokens are known; an earlier version or the endpoint may not count them."""
    return not rollout.turns or any(one.prompt_tokens for one in rollout.usage)


def read_prices(path: Path) -> Prices:
    """Raises: ConfigurationError naming the file, the model and the field."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"prices in {path} cannot be read: {error}") from error
    try:
        return Prices(TypeAdapter(dict[str, Price]).validate_python(document))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigurationError(
            f'{path}: `{where}`: {first["msg"]}; write ["model"] with input, output'
            " and, if it differs, cached: dollars per million tokens"
        ) from error
