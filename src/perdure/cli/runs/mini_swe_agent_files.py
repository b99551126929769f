"""Writes what `mini-extra swebench` leaves in its output folder: preds.json and the trajectories."""

import json
from pathlib import Path

from perdure.cli.console import many, say
from perdure.episodes.output_file import output_file
from perdure.episodes.run_export import export_run
from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys
from perdure.storage.store_url import store_to_read

PREDS = "preds.json"


def check_unused(folder: Path) -> None:
    """Raises: ConfigurationError if the folder has predictions, which a new run would replace."""
    if (folder / PREDS).exists():
        raise ConfigurationError(
            f"--output {folder}: its {PREDS} is of another run: `perdure adopt {folder}` completes"
            " those results; or give another folder, or --redo-existing"
        )


async def write(settings: Settings, run_id: str, folder: Path) -> int:
    """Write preds.json and each ID/ID.traj.json, whose submission is the captured patch.

    Returns 1 if no rollout has a patch to write.
    """
    store = store_to_read(settings)
    report = await export_run(store, run_id, "preds", folder / PREDS)
    for one in report.omitted:
        say(f"left out {one.instance_id}: {one.reason}")
    if not report.written:
        return 1
    trajectories = 0
    for instance_id, prediction in json.loads((folder / PREDS).read_bytes()).items():
        attempts = f"{store_keys.rollout(run_id, instance_id, 0)}/attempts/"
        found = [
            key async for key in store.list(attempts) if key.endswith("/agent/trajectory.json")
        ]
        if not found:
            continue
        last = max(found, key=lambda key: int(key.removeprefix(attempts).partition("/")[0]))
        try:
            trajectory = json.loads((await store.get(last)).data)
            trajectory["info"]["submission"] = prediction["model_patch"]
        except (ValueError, LookupError, TypeError):  # the agent's own file; its sandbox is hostile
            say(f"{instance_id}: the agent's trajectory is unreadable")
            continue
        trajectory["instance_id"] = instance_id
        with output_file(folder / instance_id / f"{instance_id}.traj.json") as file:
            file.write(json.dumps(trajectory, indent=2).encode())
        trajectories += 1
    say(
        f"{many(report.written, 'prediction')} and {many(trajectories, 'trajectory file')} in {folder}"
    )
    return 0
