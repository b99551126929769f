"""Reads patches made by other tools and stores each where its rollout's agent stage looks for it.

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
from perdure.rollouts import retry_selection
from perdure.rollouts.activity_messages import RolloutAgain
from perdure.storage import store_keys
from perdure.storage.base import Store
from perdure.types import RunRequest

TRAJECTORIES = "**/*.traj.json"
LISTS = ("preds.json", "all_preds.jsonl", "preds.jsonl")
"""Names of prediction files. If a folder has one, its trajectories are not read."""


class BadJson(ConfigurationError):
    """A file, or a line of it, is not JSON. It may have been cut off while it was written."""


@dataclass(frozen=True)
class Prediction:
    """One patch for one instance. Several patches for an instance are its samples, in order."""

    instance_id: str
    sample_index: int
    patch: bytes
    model: str


def read_predictions(path: Path, model: str = "") -> list[Prediction]:
    """The predictions of a file or a folder, in order; with `model`, only those of this model.

    An entry with an empty patch, or without one, is a prediction that changes nothing.
    Raises: ConfigurationError naming the entry, its field and the fix, or the models of a file that
    has several.
    """
    entries = list(_of_folder(path) if path.is_dir() else entries_of_file(path))
    if not entries:
        raise ConfigurationError(f"{path} has no predictions")
    if not any("model_patch" in entry or "patch" in entry for _, entry in entries):
        raise ConfigurationError(
            f"{entries[0][0]} lacks `model_patch`, and so does every entry: give the diff there, "
            "or null for no change"
        )
    models = dict.fromkeys(model_of(entry) for _, entry in entries)
    named = ", ".join(models)
    if model and model not in models:
        raise ConfigurationError(f"{path} has no prediction of the model {model!r}, only {named}")
    if len(models) > 1 and not model:
        raise ConfigurationError(
            f"{path} has predictions of {len(models)} models ({named}), whose patches are not samples of each "
            "other: choose one with --model NAME"
        )
    samples: Counter[str] = Counter()
    found = []
    for where, entry in entries:
        if model and model_of(entry) != model:
            continue
        instance_id = text_of(where, entry, "instance_id")
        patch = patch_of(where, entry)
        found.append(Prediction(instance_id, samples[instance_id], patch, model_of(entry)))
        samples[instance_id] += 1
    return found


def model_of(entry: Mapping[str, Any]) -> str:
    return str(entry.get("model_name_or_path") or "predictions")


def patch_of(where: str, entry: Mapping[str, Any]) -> bytes:
    patch = entry.get("model_patch", entry.get("patch"))
    if patch is not None and not isinstance(patch, str):
        raise ConfigurationError(f"{where}: `model_patch` must be text or null")
    return (patch or "").encode("utf-8", "surrogateescape")


def are_uneven(predictions: Sequence[Prediction]) -> bool:
    """Whether the instances have different numbers of patches."""
    return len(set(Counter(one.instance_id for one in predictions).values())) > 1


def digest_of(predictions: Sequence[Prediction]) -> str:
    """A digest that changes if any patch changes."""
    known = [(p.instance_id, p.sample_index, p.patch.hex()) for p in predictions]
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()


async def place(
    store: Store, run: RunRequest, refs: Mapping[str, str], predictions: Sequence[Prediction]
) -> None:
    """Store each patch for its rollout, and the list of rollouts of a run that is `listed`. The call
    is idempotent.

    `refs`: instance id -> reference. Raises: ConfigurationError if the run has another patch.
    """
    entries = []
    for prediction in predictions:
        ref, sample = refs[prediction.instance_id], prediction.sample_index
        key = store_keys.prediction(run.rollout_request(ref, sample))
        is_new = await store.put_if_absent(key, prediction.patch)
        if not is_new and (await store.get(key)).data != prediction.patch:
            raise ConfigurationError(
                f"run {run.run_id} has another patch for {prediction.instance_id} #{sample}: give "
                "another --run-id"
            )
        entries.append(RolloutAgain(instance=ref, sample_index=sample, round=0))
    if run.listed:
        await retry_selection.keep_list(store, run.run_id, 0, entries)


def entries_of_file(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each entry with its place in the file. Raises: BadJson; ConfigurationError."""
    text = _read(path)
    if path.suffix == ".jsonl":
        # Not `splitlines`: JSON text may hold other line separators, such as U+2028.
        for number, line in enumerate(text.split("\n"), 1):
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
        "exit_status": info.get("exit_status"),
        "model_name_or_path": name if isinstance(name, str) else None,
    }


def _of_folder(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in LISTS:
        if (path / name).is_file():
            yield from entries_of_file(path / name)
            return
    files = sorted(path.glob(TRAJECTORIES))
    if not files:
        raise ConfigurationError(
            f"{path} has neither {' nor '.join(LISTS)} nor a {TRAJECTORIES}: name the file"
        )
    for file in files:
        yield from entries_of_file(file)


def text_of(where: str, entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigurationError(f"{where} lacks `{name}`: it names the instance")
    return value


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadJson(f"{where} is not valid JSON: {error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise ConfigurationError(
            f"no predictions at {path}: {error.strerror}; give preds.json, a .jsonl file, "
            "or a folder of trajectories"
        ) from error
