"""For a child process: what writing and reading turns takes into it."""

import sys

from perdure.episodes import lean_arrow
from perdure.types import Turn


def loaded() -> tuple[str, list[str]]:
    """The allocator of pyarrow, and which of numpy and pandas were imported."""
    lean_arrow.set_up()
    lean_arrow.set_up()
    import pyarrow

    from perdure.episodes.turns_parquet import decode, encode

    turn = Turn(index=0, prompt_ids=(1,), completion_ids=(2,), logprobs=(-0.5,))
    assert decode(encode([turn])) == [turn]
    found = sorted({"numpy", "pandas"} & sys.modules.keys())
    return pyarrow.default_memory_pool().backend_name, found
