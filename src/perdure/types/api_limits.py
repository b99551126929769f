"""Limits of a hosted API's account per minute, hour and day."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from perdure.types.base import Request
from perdure.types.requests import Price

Window = Literal["minute", "hour", "day"]


class ApiLimits(Request):
    """What all models of the account may use together in each window of UTC time.

    Example:
        {"requests": {"minute": 500}, "tokens": {"day": 50_000_000}, "dollars": {"day": 40},
         "price": {"input": 1.25, "cached": 0.125, "output": 10}}
    """

    requests: dict[Window, PositiveInt] = Field(default_factory=dict)
    tokens: dict[Window, PositiveInt] = Field(default_factory=dict)
    """Prompt and sampled tokens together."""
    input_tokens: dict[Window, PositiveInt] = Field(default_factory=dict)
    output_tokens: dict[Window, PositiveInt] = Field(default_factory=dict)
    dollars: dict[Window, PositiveFloat] = Field(default_factory=dict)
    price: Price | None = None
    """Required for a limit in dollars."""

    @model_validator(mode="after")
    def _dollars_have_a_price(self) -> "ApiLimits":
        if self.dollars and self.price is None:
            raise ValueError("a limit in dollars needs the model's price: give 'price' too")
        return self
