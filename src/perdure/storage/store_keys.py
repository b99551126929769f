"""All keys of the store. Keys are deterministic: they contain no time and no uuid."""

import re

from perdure.types import RolloutRequest, slugify

JOURNAL = "journal/"
"""Prefix of the gateways' journals. The lifecycle rule of infra/s3 deletes what episodes do not
remove."""


RUN_LABELS = "run-labels/"
"""Prefix of what users write on runs."""


def instance(ref: str) -> str:
    """`first-steps/click-8.1.3` -> `instances/first-steps/click-8.1.3.json`."""
    return f"instances/{ref}.json"


def dataset_prefix(dataset: str) -> str:
    return f"instances/{dataset}/"


def dataset_import(dataset: str) -> str:
    """The import state of every row of a dataset's source, including rows that are not imported
    yet."""
    return f"imports/{dataset}.json"


def rejection(ref: str) -> str:
    """Why a recipe's entry does not become an instance."""
    return f"rejections/{ref}.json"


def calibration(ref: str, sandbox: str) -> str:
    """The calibration record of an instance for sandboxes of this provider."""
    return f"calibrations/{ref}/{slugify(sandbox)}.json"


def calibrations(dataset: str) -> str:
    """Prefix of all calibrations of a dataset."""
    return f"calibrations/{dataset}/"


def calibrated_ref(key: str) -> str:
    """The instance ref in a key of `calibration`."""
    return key.split("/", 1)[1].rpartition("/")[0]


def calibration_rows(workflow_id: str) -> str:
    """JSON list of the instances that a CalibrationWorkflow pages through."""
    return f"{workflow_id}/instances.json"


def calibration_report(workflow_id: str) -> str:
    return f"{workflow_id}/report.json"


def first_term(host: str) -> str:
    """The number of the host's first term that has not ended."""
    return f"hosts/{host}/term"


def job(run_id: str) -> str:
    """The request of a job of `integrations.openhands`. The job's id is its rollout's run id."""
    return f"jobs/{run_id}.json"


def run(run_id: str) -> str:
    return f"runs/{run_id}/run.json"


def run_instances(run_id: str) -> str:
    """JSON list of a run's instance refs, in order. RunWorkflow pages through it."""
    return f"runs/{run_id}/instances.json"


def run_identity(run_id: str) -> str:
    """The run's identity, which every later start must match."""
    return f"runs/{run_id}/identity.json"


def run_changes(run_id: str) -> str:
    """Prefix of the changes of a run since its first start, numbered in order."""
    return f"runs/{run_id}/changes/"


def run_label(run_id: str) -> str:
    """The run's name, note and tags."""
    return f"{RUN_LABELS}{run_id}.json"


def run_prefix(run_id: str) -> str:
    """Prefix of everything that a run has, except its label, its sessions' journals and its job."""
    return f"runs/{run_id}/"


def rerun_lists_prefix(run_id: str) -> str:
    """Prefix of the keys of `rerun_list`."""
    return f"runs/{run_id}/again/"


def rerun_list(run_id: str, round: int) -> str:
    """JSON list of the rollouts that a later start of a run reruns. Round 0: those of the first start
    of a run that is `listed`."""
    return f"{rerun_lists_prefix(run_id)}{round}.json"


def manifest(run_id: str) -> str:
    """The run's episodes and totals, written last."""
    return f"runs/{run_id}/manifest.json"


def rollouts(run_id: str) -> str:
    """Prefix of all keys that the rollouts of a run write."""
    return f"runs/{run_id}/rollouts/"


def rollout(run_id: str, instance_id: str, sample_index: int) -> str:
    return f"{rollouts(run_id)}{instance_id}/{sample_index}"


def rollout_of(request: RolloutRequest) -> str:
    return rollout(request.run_id, request.instance_id, request.sample_index)


def prediction(request: RolloutRequest) -> str:
    """The patch from another tool that the rollout applies."""
    return f"{rollout_of(request)}/prediction.diff"


def adopted(request: RolloutRequest) -> str:
    """What the rollout keeps of another program's work."""
    return f"{rollout_of(request)}/adopted.json"


def rollout_identity(request: RolloutRequest) -> str:
    """The rollout's identity. Stored checkpoints and episodes are reused only if a request matches
    it."""
    return f"{rollout_of(request)}/identity.json"


def episode(request: RolloutRequest) -> str:
    """The episode as JSON. `episode.parquet` in the same folder holds the token arrays."""
    return f"{rollout_of(request)}/episode.json"


def episode_tokens(request: RolloutRequest) -> str:
    return f"{rollout_of(request)}/episode.parquet"


def earlier_episode(episode: str, workflow_run_id: str) -> str:
    """Key to which the episode of an earlier workflow run moves when a later one replaces it."""
    return f"{episode.removesuffix('.json')}-{workflow_run_id[-8:] or '0'}.json"


def attempt(request: RolloutRequest, attempt: int) -> str:
    return f"{rollout_of(request)}/attempts/{attempt}"


def journal(session_id: str) -> str:
    return f"{JOURNAL}{session_id}/"


def journal_record(session_id: str, number: int) -> str:
    return f"{journal(session_id)}{number:06d}"


def is_journal_record(key: str) -> bool:
    return re.fullmatch(r"\d{6}", key.rpartition("/")[2]) is not None
