"""Which policy versions may sample a session, computed from its group's `max_staleness`.

The labels are set when a rollout opens its session, and read at every call.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from perdure.engines.state import EngineRecord

POLICY_VERSION, MAX_STALENESS = "policy_version", "max_staleness"


@dataclass(frozen=True)
class Versions:
    """From `first` to `last`, both included. None = any version.

    Example:
        Versions.of({"policy_version": "12", "max_staleness": "1"}).include(13)
    """

    first: int | None = None
    last: int | None = None

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> "Versions":
        version, allowed = labels.get(POLICY_VERSION), labels.get(MAX_STALENESS)
        if not version or not allowed:
            return cls()
        return cls(int(version), int(version) + int(allowed))

    def include(self, version: int | None) -> bool:
        """Whether an engine with this version may sample. If there are limits, an engine of unknown
        version may not."""
        if self.first is None or self.last is None:
            return True
        return version is not None and self.first <= version <= self.last

    def allow(self, version: int | None) -> bool:
        """Whether it may sample now or after an update; versions only increase."""
        return self.last is None or version is None or version <= self.last

    def lacked_by(self, record: EngineRecord) -> str:
        """For people: the version that an engine has instead."""
        if self.include(record.version):
            return ""
        has = "an unknown version" if record.version is None else f"version {record.version}"
        return f", serves {has}, but this group needs {self}"

    def __str__(self) -> str:
        return f"policy version {self.first}" + (
            f" to {self.last}" if self.last != self.first else ""
        )
