"""Prints the samples of Inspect's logs as JSON lines.

It runs where Inspect is installed: `python inspect_logs.py FILE_OR_FOLDER`.
"""

import json
import math
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from inspect_ai.log import (
    EvalLog,
    EvalSample,
    list_eval_logs,
    read_eval_log,
    read_eval_log_samples,
)
from inspect_ai.scorer import Score, value_to_float
from pydantic import ValidationError

LARGE = {"messages", "events", "attachments", "events_data", "output"}
"""Fields of a sample that are not read."""
PATCH = "model_patch"
"""The key of inspect_evals for a diff, in a score's metadata or in the sample's store."""
Key = tuple[str, str, str, int]


def main(path: Path) -> None:
    """A retried evaluation has several logs. For each sample, print the newest result with a
    verdict, or the newest one if none has a verdict."""
    kept: dict[Key, dict[str, Any]] = {}
    for file in files(path):
        name = str(file.relative_to(path)) if path.is_dir() else file.name
        try:
            for key, found in samples(file, name):
                if key not in kept or (found["scores"] and not kept[key]["scores"]):
                    kept[key] = found
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            tell(error=f"{name}: `{field}`: {first['msg']}: give a log of Inspect, or remove it")
            return
        except (BadZipFile, EOFError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            tell(note=f"{name} is not whole: {why}; `inspect log recover` may restore its samples")
    for found in kept.values():
        tell(**found)


def files(path: Path) -> list[Path]:
    """The newest first."""
    if path.is_file():
        return [path]
    found = [Path(one.name.removeprefix("file://")) for one in list_eval_logs(str(path))]
    return sorted(found, key=lambda one: one.name, reverse=True)


def samples(file: Path, name: str) -> Iterator[tuple[Key, dict[str, Any]]]:
    log = read_eval_log(str(file), header_only=file.suffix == ".eval")
    for one in read_samples(log, file):
        key = (log.eval.task_id, log.eval.model, str(one.id), one.epoch)
        yield key, described(one, log, name)


def read_samples(log: EvalLog, file: Path) -> Iterator[EvalSample]:
    if file.suffix != ".eval":
        yield from log.samples or []
        return
    yield from read_eval_log_samples(
        str(file), all_samples_required=False, exclude_fields=set(LARGE)
    )


def described(sample: EvalSample, log: EvalLog, name: str) -> dict[str, Any]:
    lacks = why_no_verdict(sample)
    scores = {} if lacks else dict(numbers(sample.scores or {}))
    if not lacks and not scores:
        lacks = "it has no score"
    return {
        "instance_id": str(sample.id),
        "origin": f"Inspect {version('inspect_ai')}",
        "file": f"{name} sample {sample.id} epoch {sample.epoch}",
        "agent": log.eval.solver or log.eval.task,
        "model": log.eval.model,
        "scores": scores or None,
        "patch": None if sample.error else patch_of(sample),
        "lacks": lacks,
    }


def why_no_verdict(sample: EvalSample) -> str:
    """Empty if its scores count."""
    if sample.error is not None:
        return str(sample.error.message).strip().rpartition("\n")[2][:200]
    if getattr(sample, "invalidation", None) is not None:
        return "it was invalidated"
    if sample.limit is not None and sample.limit.type == "operator":
        return "an operator stopped it"
    return ""


def numbers(scores: dict[str, Score]) -> Iterator[tuple[str, float]]:
    """Scores that are one number, such as `C` or 0.5. NaN marks a sample that was not scored."""
    to_float = value_to_float()
    for name, score in scores.items():
        if isinstance(score.value, str | int | float):
            value = to_float(score.value)
            if math.isfinite(value):
                yield name, value


def patch_of(sample: EvalSample) -> str | None:
    places = [sample.store, *(one.metadata or {} for one in (sample.scores or {}).values())]
    texts = {one[PATCH] for one in places if isinstance(one.get(PATCH), str)}
    return texts.pop() if len(texts) == 1 else None


def tell(**fields: Any) -> None:
    print(json.dumps(fields))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
