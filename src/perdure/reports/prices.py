"""Money from tokens, by a TOML file of prices in dollars per million tokens.

Example:
    ["gpt-5*"]          # a glob of the model's name; the first that matches counts
    input = 1.25
    cached = 0.125      # prompt tokens read from the provider's cache; default: as input
    output = 10.0
"""

import fnmatch
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from perdure.errors import ConfigurationError
from perdure.reports.facts import RolloutFacts
from perdure.types import Price


def cost(price: Price, rollout: RolloutFacts) -> float:
    """Dollars of all model calls of a rollout's last attempt."""
    return price.of(rollout.prompt_tokens, rollout.cached_tokens, rollout.sampled_tokens)


@dataclass(frozen=True)
class Prices:
    """By glob of the model's name."""

    by_model: Mapping[str, Price]

    def of(self, *names: str) -> Price | None:
        """The price of a model that goes by these names; None if the file has none."""
        for glob, price in self.by_model.items():
            if any(name and fnmatch.fnmatchcase(name, glob) for name in names):
                return price
        return None


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
