"""The grader contract: a fresh sandbox and a captured diff give one verdict.

The host supplies and parses everything hidden: tests, lists, gold patch. No grader believes what
the agent or the code under test reports about itself.
"""

from typing import ClassVar, NamedTuple, Protocol

from perdure.sandboxes.base import Sandbox
from perdure.types import Grade, Instance


class Graded(NamedTuple):
    """The verdict, and the raw output of the test run."""

    grade: Grade
    log: bytes
    junit: bytes | None = None
    unreached: frozenset[str] = frozenset()
    """Listed hosts that could not be reached during the tests."""


class Grader(Protocol):
    """One grading protocol, routed to by `Instance.grading.protocol`."""

    name: ClassVar[str]
    version: ClassVar[int]

    def validate(self, instance: Instance) -> None:
        """Check that the row has everything the protocol needs, before any sandbox boots.

        Raises: InstanceError naming the field and the fix.
        """
        ...

    async def grade(
        self, sandbox: Sandbox, instance: Instance, patch: bytes, *, timeout_s: float
    ) -> Graded:
        """Apply `patch` (empty: the unpatched base) in a fresh sandbox and run the hidden tests.

        Returns every verdict, timeouts and tampering included.
        Raises: SandboxLost, RetryHere (infrastructure: grade again in a new sandbox),
        InstanceError (the row's own tests cannot be applied).
        """
        ...
