"""Router replay (R3, arXiv:2510.11370): the experts that a mixture of experts chose for each token.

A trainer's forward pass through the same experts reproduces the engine's logprobs.
"""

import base64
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from perdure.types.base import Frozen

if TYPE_CHECKING:
    import numpy

    ExpertRows = numpy.ndarray[Any, numpy.dtype[Any]]
else:
    ExpertRows = Any

CODEC = "zstd"
MOST_EXPERTS = 1 << 15
"""verl and SkyRL take experts as int16."""


def _binary_in(value: Any) -> Any:
    return base64.b64decode(value) if isinstance(value, str) else value


def _binary_out(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


Binary = Annotated[
    bytes, BeforeValidator(_binary_in), PlainSerializer(_binary_out, when_used="json")
]
"""Bytes. In JSON always base64."""


def are_experts(rows: ExpertRows) -> bool:
    """Whether an array can hold experts: integers of shape [N, layers, top_k]."""
    if rows.ndim != 3 or rows.dtype.kind not in "iu":
        return False
    return bool(rows.min(initial=0) >= 0 and rows.max(initial=0) < MOST_EXPERTS)


class RoutedExperts(Frozen):
    """The experts of the positions [start, start + rows) of a turn's prompt + completion.

    Row i holds the experts that processed the token at position `start + i`, so they decided the
    token after it. `start` is the position of the parent turn's last token, which no earlier
    forward pass read, or 0. The turn's own last token has no row: no forward pass follows it.
    """

    start: int
    rows: int
    layers: int
    """1 for SGLang, which returns layers and experts in one dimension: `top_k` is then their
    product."""
    top_k: int
    dtype: str
    """`uint8`, or `int16` if an expert's number is above 255."""
    data: Binary
    """The array [rows, layers, top_k] in C order, compressed with zstd."""

    @property
    def end(self) -> int:
        return self.start + self.rows

    @classmethod
    def of(cls, rows: ExpertRows, start: int) -> "RoutedExperts":
        """`rows`: shape [N, layers, top_k], as `are_experts` allows them."""
        import numpy
        import pyarrow

        narrow = rows.max(initial=0) < 256
        compact = numpy.ascontiguousarray(rows, numpy.uint8 if narrow else numpy.int16)
        count, layers, top_k = compact.shape
        data = pyarrow.compress(compact.tobytes(), CODEC, asbytes=True)
        return cls(
            start=start,
            rows=count,
            layers=layers,
            top_k=top_k,
            dtype=compact.dtype.name,
            data=data,
        )

    def array(self) -> ExpertRows:
        """Shape [rows, layers, top_k]; read-only."""
        import numpy
        import pyarrow

        dtype = numpy.dtype(self.dtype)
        size = self.rows * self.layers * self.top_k * dtype.itemsize
        data = pyarrow.decompress(self.data, size, CODEC, asbytes=True)
        return numpy.frombuffer(data, dtype).reshape(self.rows, self.layers, self.top_k)
