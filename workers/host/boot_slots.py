"""A slot supplier that maps boot slots to seats, so that a full host polls for no more boots.

A rollout that waits for a seat is a boot activity in Temporal's queue. It belongs to no host yet,
and Temporal keeps the order.
"""

import asyncio
from time import monotonic
from weakref import WeakSet

import structlog
from temporalio.worker import (
    CustomSlotSupplier,
    FixedSizeSlotSupplier,
    SlotMarkUsedContext,
    SlotPermit,
    SlotReleaseContext,
    SlotReserveContext,
    WorkerTuner,
)

from perdure.rollouts.admission.host_seats import Reservation, Seats
from perdure.rollouts.sandbox.host_term import HostTerm

log = structlog.get_logger("perdure.seats")

LOOK_S = 0.2
"""Seconds between two checks for a free seat."""
PAUSED_S = 10.0
"""Seconds of delay after which this process, and with it the agents' watchers, was stopped."""
UNUSED = FixedSizeSlotSupplier(1)


class SeatPermit(SlotPermit):
    def __init__(self, reservation: Reservation) -> None:
        self.reservation = reservation


class SeatSupplier(CustomSlotSupplier):
    """A slot is a reserved seat, at most `boots` at once in this process.

    No seat is reserved while the host's term may be over, because the next term begins without
    sandboxes.
    """

    def __init__(self, seats: Seats, term: HostTerm, boots: int) -> None:
        self._seats, self._term, self._boots = seats, term, boots
        self._out: WeakSet[SeatPermit] = WeakSet()  # the SDK may drop a permit unreleased
        seats.keep()

    async def reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit:
        while (permit := self.try_reserve_slot(ctx)) is None:
            began = monotonic()
            await asyncio.sleep(LOOK_S)
            if monotonic() - began > PAUSED_S:
                self._seats.keep()
        return permit

    def try_reserve_slot(self, ctx: SlotReserveContext) -> SlotPermit | None:
        if len(self._out) >= self._boots or not self._term.is_confirmed:
            return None
        try:
            reservation = self._seats.reserve()
        except OSError as error:  # on a full disk, boot no new sandbox
            log.warning("no seat can be reserved", reason=str(error))
            return None
        if reservation is None:
            return None
        permit = SeatPermit(reservation)
        self._out.add(permit)
        return permit

    def mark_slot_used(self, ctx: SlotMarkUsedContext) -> None:
        return None

    def release_slot(self, ctx: SlotReleaseContext) -> None:
        assert isinstance(ctx.permit, SeatPermit)
        self._out.discard(ctx.permit)
        ctx.permit.reservation.release()


def tuner(seats: Seats, term: HostTerm, boots: int) -> WorkerTuner:
    """The tuner of a worker that runs only boots."""
    return WorkerTuner.create_composite(
        workflow_supplier=UNUSED,
        activity_supplier=SeatSupplier(seats, term, boots),
        local_activity_supplier=UNUSED,
        nexus_supplier=UNUSED,
    )
