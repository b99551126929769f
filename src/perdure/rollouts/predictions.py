"""Reads patches made by other tools and stores each where its rollout's grading looks for it.

It reads SWE-bench predictions (a JSON list, JSON lines, or an object keyed by instance id, such as
mini-swe-agent's `preds.json`) and folders of mini-swe-agent trajectories (`info.submission`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.errors import ConfigurationError
from perdure.graders.diff.git_diff_parser import count_files
from perdure.rollouts import stage_checkpoints
from perdure.rollouts.activity_messages import AgentRun
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import AgentEnd, PatchRef, RolloutRequest, RunRequest

TRAJECTORIES = "**/*.traj.json"
LISTS = ("preds.json", "all_preds.jsonl", "preds.jsonl")
"""Names of prediction files. If a folder has one, its trajectories are not read."""


@dataclass(frozen=True)
class Prediction:
    """One patch for one instance. Several patches for an instance are its samples, in order."""

    instance_id: str
    sample_index: int
    patch: bytes
    model: str = ""


def read_predictions(path: Path) -> list[Prediction]:
    """The predictions of a file or a folder, in order.

    Raises: ConfigurationError naming the entry, its field and the fix.
    """
    entries = _of_folder(path) if path.is_dir() else _of_file(path)
    samples: Counter[str] = Counter()
    found = []
    for where, entry in entries:
        instance_id = _text(where, entry, "instance_id")
        if "model_patch" not in entry and "patch" not in entry:
            raise ConfigurationError(f"{where} lacks `model_patch`: use null for no change")
        patch = entry.get("model_patch", entry.get("patch"))
        if patch is not None and not isinstance(patch, str):
            raise ConfigurationError(f"{where}: `model_patch` must be text or null")
        model = entry.get("model_name_or_path")
        data = (patch or "").encode("utf-8", "surrogateescape")
        found.append(
            Prediction(instance_id, samples[instance_id], data, model if model else "predictions")
        )
        samples[instance_id] += 1
    if not found:
        raise ConfigurationError(f"{path} has no predictions")
    return found


def digest_of(predictions: Sequence[Prediction]) -> str:
    """A digest that changes if any patch changes."""
    known = [(p.instance_id, p.sample_index, p.patch.hex()) for p in predictions]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


async def place(
    store: Store, run: RunRequest, refs: Mapping[str, str], predictions: Sequence[Prediction]
) -> None:
    """Store each patch as the capture of its rollout's first attempt. The call is idempotent.

    `refs`: instance id -> reference. Raises: ConfigurationError if the run has another patch.
    """
    for prediction in predictions:
        request = run.rollout_request(refs[prediction.instance_id], prediction.sample_index)
        await _place(store, request, prediction)


async def _place(store: Store, request: RolloutRequest, prediction: Prediction) -> None:
    patch = prediction.patch
    folder = store_keys.attempt(request, 1)
    await store.put_if_absent(f"{folder}/patch.diff", patch)
    given = PatchRef(
        key=f"{folder}/patch.diff",
        sha256=hashlib.sha256(patch).hexdigest(),
        size=len(patch),
        empty=not patch.strip(),
        files=count_files(patch),
    )
    kept = await stage_checkpoints.write(store, f"{folder}/patch.json", given)
    if kept.sha256 != given.sha256:
        raise ConfigurationError(
            f"run {request.run_id} has another patch for {request.instance_id}"
            f" #{request.sample_index}: give another --run-id"
        )
    agent = AgentRun(end=AgentEnd.FINISHED, detail="given as a prediction", model=prediction.model)
    await stage_checkpoints.write(store, f"{folder}/agent.json", agent)


def _of_file(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text = _read(path)
    if path.suffix == ".jsonl":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield from _entries(f"{path} line {number}", _json(f"{path} line {number}", line))
        return
    yield from _entries(str(path), _json(str(path), text))


def _entries(where: str, document: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A list of entries, an object by instance id, a trajectory, or one entry."""
    if isinstance(document, list):
        for number, entry in enumerate(document, 1):
            yield from _entries(f"{where} entry {number}", entry)
    elif not isinstance(document, dict):
        raise ConfigurationError(f"{where} is not a prediction: give objects with `instance_id`")
    elif "info" in document:
        yield where, _of_trajectory(where, document)
    elif "instance_id" in document:
        yield where, document
    else:
        for instance_id, entry in document.items():
            if not isinstance(entry, dict):
                raise ConfigurationError(
                    f"{where}: {instance_id!r} is not a prediction: give objects with `instance_id`"
                )
            yield f"{where}: {instance_id}", {"instance_id": instance_id, **entry}


def _of_trajectory(where: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """A mini-swe-agent trajectory as a prediction. Without a submission, its patch is empty."""
    info = document["info"] if isinstance(document["info"], dict) else {}
    named = document.get("instance_id") or Path(where).name.removesuffix(".traj.json")
    config = info.get("config") if isinstance(info.get("config"), dict) else {}
    model = config.get("model") if isinstance(config, dict) else None
    name = model.get("model_name") if isinstance(model, dict) else None
    return {
        "instance_id": named,
        "model_patch": info.get("submission"),
        "model_name_or_path": name if isinstance(name, str) else None,
    }


def _of_folder(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in LISTS:
        if (path / name).is_file():
            yield from _of_file(path / name)
            return
    files = sorted(path.glob(TRAJECTORIES))
    if not files:
        raise ConfigurationError(
            f"{path} has neither {' nor '.join(LISTS)} nor a {TRAJECTORIES}: name the file"
        )
    for file in files:
        yield from _of_file(file)


def _text(where: str, entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{where} lacks `{name}`: it names the instance")
    return value


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where} is not valid JSON: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise ConfigurationError(
            f"no predictions at {path}: {error.strerror}; give preds.json, a .jsonl file, "
            "or a folder of trajectories"
        ) from error
