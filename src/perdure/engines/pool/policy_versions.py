"""The policy versions that may sample for a session, computed from its group's `max_staleness`.

A rollout sets the labels when it opens its session; every call reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from perdure.engines.engine_state import EngineRecord

POLICY_VERSION, MAX_STALENESS, TOO_STALE = "policy_version", "max_staleness", "too_stale"
OF_POLICY = (POLICY_VERSION, MAX_STALENESS, TOO_STALE)
FINISH = "finish"


@dataclass(frozen=True)
class Versions:
    """The versions from `first` to `last`, inclusive; all versions if these are None.

    Example:
        Versions.of({"policy_version": "12", "max_staleness": "1"}).include(13)
    """

    first: int | None = None
    last: int | None = None
    may_finish: bool = False
    """Whether any engine may continue the call once all serve newer versions (`too_stale: finish`)."""

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> "Versions":
        version, allowed = labels.get(POLICY_VERSION), labels.get(MAX_STALENESS)
        if not version or not allowed:
            return cls()
        may_finish = labels.get(TOO_STALE) == FINISH
        return cls(int(version), int(version) + int(allowed), may_finish)

    def include(self, version: int | None) -> bool:
        """Whether an engine with this version may sample. If there are limits, an engine whose version is
        unknown may not."""
        if self.first is None or self.last is None:
            return True
        return version is not None and self.first <= version <= self.last

    def allow(self, version: int | None) -> bool:
        """Whether an engine with this version may sample now or after an update. Versions only increase."""
        return self.last is None or version is None or version <= self.last

    def explain_mismatch(self, record: EngineRecord) -> str:
        """Which version an engine has instead, as text for people; empty if its version is accepted."""
        if self.include(record.version):
            return ""
        has = "an unknown version" if record.version is None else f"version {record.version}"
        return f", serves {has}, but this group accepts only {self}"

    def __str__(self) -> str:
        return f"policy version {self.first}" + (
            f" to {self.last}" if self.last != self.first else ""
        )
