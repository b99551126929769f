"""Makes a closed session's `turns.parquet` from its journal.

Callers run it in a thread, because a long session takes a second.
"""

from typing import Any

from perdure.gateway.journal.recorded_turns import turn_deltas
from perdure.gateway.journal.turn_record import turn_records


def turns_file(records: list[dict[str, Any]]) -> bytes:
    """The file's content."""
    from perdure.episodes import turns_parquet as codec

    return codec.encode_deltas(codec.Delta(*delta) for delta in turn_deltas(turn_records(records)))
