"""A try of a stage without Temporal."""

from activities.activity_context import signal_account


class OneTry:
    """A try of a stage, in one run of the rollout's workflow."""

    number = 1
    signal_account = staticmethod(signal_account)

    def __init__(self, play: str) -> None:
        self.play = play

    def now(self) -> float:
        return 0.0

    def is_cancelled_on_purpose(self) -> bool:
        return False

    def is_superseded(self) -> bool:
        return False

    async def workflow_may_be_open(self) -> bool:
        return True

    def report(self, **progress: object) -> None:
        """Heartbeat details are dropped."""
