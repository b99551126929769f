"""Prints the trials of a Harbor job as JSON lines.

It runs where Harbor is installed: `python harbor_job.py FOLDER`.
"""

import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harbor.models.trial.result import TrialResult
from pydantic import ValidationError

AGENT_LIMITS = {
    *("AgentTimeoutError", "AgentSafetyRefusalError", "ContentPolicyViolationError"),
    *("ContextWindowExceededError", "ContextLengthExceededError"),
    *("OutputTokenExceededError", "OutputLengthExceededError"),
}
"""Exceptions after which the verdict still judges the agent's own work. Harbor also trusts rewards
after a nonzero exit code or an unknown exception. We do not, because an API outage can cause
both."""
AFTER_AGENT = {
    *("VerifierTimeoutError", "RewardFileNotFoundError", "RewardFileEmptyError"),
    *("VerifierOutputParseError", "AddTestsDirError", "DownloadVerifierDirError"),
}
"""Exceptions during grading, when the agent's patch is already complete."""


def main(folder: Path) -> None:
    for trial in sorted(path for path in folder.iterdir() if path.is_dir()):
        path = trial / "result.json"
        name = str(path.relative_to(folder))
        if not path.exists():
            if (trial / "config.json").exists():
                tell(note=f"{trial.name} has no result.json: its trial did not end")
            continue
        data = path.read_bytes()
        try:
            json.loads(data)
        except ValueError:
            tell(note=f"{name} is not complete: its trial was stopped while it was written")
            continue
        try:
            result = TrialResult.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            tell(error=f"{name}: `{field}`: {first['msg']}: give a trial of Harbor, or remove it")
            return
        tell(**described(result, trial, name))


def described(result: TrialResult, trial: Path, name: str) -> dict[str, Any]:
    failed = [one.exception_type for one in exceptions(result)]
    model = result.agent_info.model_info
    names = (model.provider, model.name) if model else ()
    rewards = result.verifier_result.rewards if result.verifier_result else None
    broken = [one for one in failed if one not in AGENT_LIMITS]
    is_whole = all(one in AFTER_AGENT for one in broken)
    return {
        "instance_id": result.task_id.get_name().rpartition("/")[2],
        "origin": f"Harbor {version('harbor')}",
        "file": name,
        "agent": result.agent_info.name,
        "model": "/".join(part for part in names if part),
        "scores": None if broken or not rewards else rewards,
        "patch": patch_of(trial) if is_whole else None,
        "lacks": broken[0] if broken else "" if rewards else "the verifier gave no reward",
    }


def exceptions(result: TrialResult) -> Iterator[Any]:
    for one in (result, *(result.step_results or [])):
        if one.exception_info is not None:
            yield one.exception_info


def patch_of(trial: Path) -> str | None:
    """The trial's artifact that is a diff, if there is exactly one."""
    found = [p for end in ("diff", "patch") for p in (trial / "artifacts").rglob(f"*.{end}")]
    return found[0].read_bytes().decode("utf-8", "surrogateescape") if len(found) == 1 else None


def tell(**fields: Any) -> None:
    print(json.dumps(fields))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
