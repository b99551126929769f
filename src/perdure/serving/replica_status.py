"""The manager's last status of its replicas, an object in the store that `perdure` shows."""

from pydantic import Field

from perdure.errors import NotFound
from perdure.serving.replica_plan import ReplicaPool
from perdure.storage.base import Store
from perdure.types import Frozen


class ReplicaStatus(Frozen):
    """The status of one planned replica."""

    index: int
    state: str
    """`waiting` (for room on a node), `starting`, `ready`, `backing off`, `given up`."""
    generation: int = 0
    engine: str = ""
    """`host:port`; empty until the replica has joined the pool."""
    node: str = ""
    log: str = ""
    reason: str = ""


class PoolStatus(Frozen):
    """The part of `perdure engines list` about replicas that Ray runs."""

    address: str = ""
    """The Ray cluster's address."""
    dashboard: str = ""
    model: str = ""
    served_model: str = ""
    """The model name in requests."""
    replicas: tuple[ReplicaStatus, ...] = ()
    leaving: tuple[ReplicaStatus, ...] = ()
    at: float = Field(0.0)
    """Unix seconds."""

    @property
    def managed(self) -> frozenset[str]:
        return frozenset(one.engine for one in (*self.replicas, *self.leaving) if one.engine)


async def read_status(store: Store, pool: ReplicaPool) -> PoolStatus:
    try:
        return PoolStatus.model_validate_json((await store.get(pool.status_key)).data)
    except NotFound:
        return PoolStatus()


async def write_status(store: Store, pool: ReplicaPool, status: PoolStatus) -> None:
    await store.put(pool.status_key, status.model_dump_json(indent=1).encode())
