"""The tokens that top-p and top-k left for each sampled token (DeepSeek-V3.2, arXiv:2512.02556, 3.1).

A trainer that normalises over the same tokens reproduces the engine's logprobs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from perdure.types.base import Frozen
from perdure.types.routed_experts import CODEC, Binary

if TYPE_CHECKING:
    import numpy

    Ids = numpy.ndarray[Any, numpy.dtype[numpy.int32]]
else:
    Ids = Any


class KeptTokens(Frozen):
    """The sets of a turn's sampled tokens, in their order.

    Example: `KeptTokens.of([[5, 7], [6]])` has `counts() == [2, 1]` and `ids() == [5, 7, 6]`.
    """

    rows: int
    """The turn's sampled tokens."""
    total: int
    """The sizes of all sets together."""
    data: Binary
    """The int32 arrays `counts` [rows] and `ids` [total], one after the other, compressed with zstd."""

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]]) -> "KeptTokens":
        import numpy
        import pyarrow

        flat = [len(one) for one in sets]
        for one in sets:
            flat.extend(one)
        data = pyarrow.compress(numpy.array(flat, numpy.int32).tobytes(), CODEC, asbytes=True)
        return cls(rows=len(sets), total=len(flat) - len(sets), data=data)

    def counts(self) -> Ids:
        """Shape [rows]; read-only."""
        return self._arrays()[: self.rows]

    def ids(self) -> Ids:
        """Shape [total]; read-only."""
        return self._arrays()[self.rows :]

    def _arrays(self) -> Ids:
        import numpy
        import pyarrow

        size = 4 * (self.rows + self.total)
        return numpy.frombuffer(
            pyarrow.decompress(self.data, size, CODEC, asbytes=True), numpy.int32
        )
