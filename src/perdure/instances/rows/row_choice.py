"""The rows of a source that a command asks for."""

import fnmatch
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """The first `limit` instances that match a glob of `include`, and none of `exclude`."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    limit: int | None = None
    skip_bad_rows: bool = False
    """Bad rows do not count against the limit. If False, the caller fails on one."""

    def wants(self, instance_id: str) -> bool:
        included = not self.include or any(fnmatch.fnmatch(instance_id, g) for g in self.include)
        return included and not any(fnmatch.fnmatch(instance_id, glob) for glob in self.exclude)


ALL = Choice()
