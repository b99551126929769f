"""The journal contract: every turn is durable here before it is answered."""

from collections.abc import Sequence
from typing import Any, Protocol

from perdure.errors import Boundary, PerdureError


class Overtaken(PerdureError):
    """Another gateway process committed to this session first: read its records, then decide again."""

    boundary = Boundary.GATEWAY


class Journal(Protocol):
    """The durable, ordered records of every session; shared by all gateway processes of a pool.

    Records are numbered 0, 1, ... per session. A writer names the number its record
    shall get. If two processes write to one session at once, one wins and the other gets `Overtaken`.
    """

    async def read(self, session_id: str, after: int = 0) -> list[dict[str, Any]]:
        """The records from number `after` on; [] when there are none (or no such session).

        Raises: JournalDamaged, which has the records before the damage if `after` is 0;
        StoreUnavailable.
        """
        ...

    async def append(self, session_id: str, record: dict[str, Any], *, position: int) -> None:
        """Durable when it returns. Raises: Overtaken when number `position` is already taken;
        GatewayUnavailable when it cannot be written (disk full, store unreachable): nothing was."""
        ...

    async def pack(self, session_id: str, records: Sequence[dict[str, Any]]) -> None:
        """The session is closed, and these are all of its records: keep them in few objects.

        Raises: StoreUnavailable.
        """
        ...

    async def forget(self, session_id: str) -> None:
        """Delete the records of a closed session; repeating is harmless. Raises: StoreUnavailable."""
        ...

    async def aclose(self) -> None:
        """Write what is queued."""
        ...
