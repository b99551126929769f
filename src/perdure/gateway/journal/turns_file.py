"""A closed session's `turns.parquet`, made of its journal.

One function on records, for a thread: a long session takes a second.
"""

from typing import Any

from perdure.gateway.journal.turn_record import turn_records
from perdure.gateway.journal.turns import turn_deltas


def turns_file(records: list[dict[str, Any]]) -> bytes:
    """The content of the file."""
    from perdure.episodes import turns_parquet as codec

    return codec.encode_deltas(codec.Delta(*delta) for delta in turn_deltas(turn_records(records)))
