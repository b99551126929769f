"""Names that callers and workers share: workflow types, task queues, signals, memos, errors."""

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
"""Signal to a rollout: it has a seat, and its sandbox takes longer than a moment to boot."""
SPENT = "spent"
"""Signal to a rollout or a group: the run's budget is used up, so stop the agents and grade their
work."""

TRUNCATE = "truncate"
"""Signal to a shard, a group or a rollout: the run's time is over. Its argument is a Truncation."""

OPENED = "opened"
"""Signal to a parked rollout: a user opened the accounts early, so it asks again."""

CHANGED = "changed"
"""Memo of a run or a group: its changeable fields, set after the first change."""
BEGAN = "began"
"""Memo of a run that continues as new: when its first execution started, in Unix seconds."""
PAUSED = "paused"
"""Memo of a run that continues as new: whether it was paused, and for which failure."""

WITHOUT_VERDICT = "NoVerdict"
"""Error type of a rollout that failed. Its detail is the EpisodeRef."""

ENDING = "RunEnding"
"""Error type of a change that arrives while the run writes its manifest."""

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
"""Search attributes of rollouts, with the type names of `temporal --search-attribute`. 8 Keyword, 3
Int and 1 Double fit the fixed columns of Temporal's SQL visibility."""


def host_queue(host: str) -> str:
    """The queue of one host's agent workers. Only they reach sandboxes that are processes of the
    host."""
    return f"{AGENT_QUEUE}@{host}"


def upkeep_queue(host: str) -> str:
    """The queue for captures, cleanups and sweeps of one host, which never queue behind its
    agents."""
    return f"upkeep@{host}"


def life_queue(host: str) -> str:
    """The queue that the process with the host's heartbeats polls."""
    return f"life@{host}"


def host_id(host: str) -> str:
    """Id of the workflow that tracks whether the host is alive."""
    return f"host/{host}"


def account_id(account: str) -> str:
    """Id of the workflow that keeps the permits of one provider account."""
    return f"sandbox-account/{account}"
