"""Names that a caller and the workers must agree on: workflow types, task queues, signals."""

ROLLOUT = "RolloutWorkflow"
GROUP = "RolloutGroupWorkflow"
RUN = "RunWorkflow"
SHARD = "RunShardWorkflow"
REAPER = "ReaperWorkflow"
ACCOUNT = "SandboxAccountWorkflow"
HOST = "HostWorkflow"
CALIBRATION = "CalibrationWorkflow"

GRANTED = "granted"
"""Signal to a rollout: the sandbox that it waits for may be created now."""
BOOTING = "booting"
"""Signal to a rollout: it has a seat, and its sandbox is being made for longer than a moment."""
SPENT = "spent"
"""Signal to a rollout or a group: the run's budget is used up, so buy no more and grade what there is."""

CHANGED = "changed"
"""Memo of a run: those of its fields that may change, once one of them has changed."""
PAUSED = "paused"
"""Memo of a run that continues as new: whether it was paused, and what it waited for."""

WITHOUT_VERDICT = "NoVerdict"
"""Type of the error of a rollout that failed; its detail is the EpisodeRef."""

ENDING = "RunEnding"
"""Type of the error of a change that comes while the run writes its manifest."""

WORKFLOWS_QUEUE = "rollout-workflows"
BOOT_QUEUE = "sandbox-boot"
AGENT_QUEUE = "agent-runs"
GRADE_QUEUE = "grading"
IO_QUEUE = "rollout-io"
LOST_HOSTS_QUEUE = "lost-hosts"


SEARCH_ATTRIBUTES = {
    "PerdureRun": "Keyword",
    "PerdureGroup": "Keyword",
    "PerdureInstance": "Keyword",
    "PerdureDataSource": "Keyword",
    "PerdureAgent": "Keyword",
    "PerdureStage": "Keyword",
    "PerdureOutcome": "Keyword",
    "PerdureFailure": "Keyword",
    "PerdureSample": "Int",
    "PerdureAttempt": "Int",
    "PerdurePolicyVersion": "Int",
    "PerdureReward": "Double",
}
"""Those of every rollout, the way `temporal --search-attribute` spells their types: 8 Keyword, 3 Int and
1 Double fit the fixed columns of Temporal's SQL visibility."""


def host_queue(host: str) -> str:
    """The queue of one host's agent workers: only they reach sandboxes that are its processes."""
    return f"{AGENT_QUEUE}@{host}"


def upkeep_queue(host: str) -> str:
    """Captures, clean-ups and sweeps of one host: short work that never waits behind its agents."""
    return f"upkeep@{host}"


def life_queue(host: str) -> str:
    """Polled by the process that shows the host's signs of life."""
    return f"life@{host}"


def host_id(host: str) -> str:
    """The workflow that knows whether the host lives."""
    return f"host/{host}"


def account_id(account: str) -> str:
    """The workflow that keeps the permits of one provider account."""
    return f"sandbox-account/{account}"
