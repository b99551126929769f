"""Writes a run as a dataset for the Hugging Face hub: a folder with JSON lines and a card.

`datasets.load_dataset(FOLDER, "rollouts")` opens it, also from the hub. Tool schemas and arguments stay
JSON text, because their fields differ between tools.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from perdure.episodes.episode import Episode
from perdure.episodes.episode_store import scan_run
from perdure.episodes.output_file import is_standard_output
from perdure.episodes.run_export import ExportReport, export_run
from perdure.errors import ConfigurationError, MissingDependency
from perdure.installation import command_for_packages
from perdure.instances.rows.row_readers import hub_unreachable_reason
from perdure.storage.base import Store

CARD = """\
---
configs:
{configs}tags:
- agent
- software-engineering
---

# {run_id}

{rollouts} rollouts of {agents} with {models} on {instances} instances of {datasets}; {resolved} are resolved, {exposed} exposed as forged.

- `rollouts`: one row for each rollout: how it ended, its reward, turns, tokens and seconds
- `sft`: one row for each conversation of a graded rollout: messages, tools as JSON text, reward

Written by Perdure {version} from the gateway's own record.
"""
CONFIG = """\
- config_name: {name}
  data_files: data/{name}.jsonl
"""
DEFAULT = "  default: true\n"
"""Marks the config before it as the one that `load_dataset` opens if none is named."""
COLUMNS = {
    *("instance", "sample_index", "agent", "status", "outcome", "reward", "turns", "seconds"),
    *("prompt_tokens", "cached_tokens", "sampled_tokens", "trainable", "started_at"),
}


async def write_folder(store: Store, run_id: str, folder: Path) -> ExportReport:
    """Raises: NotFound when the run has no episodes."""
    if is_standard_output(folder) or (folder.exists() and not folder.is_dir()):
        raise ConfigurationError(f"{folder} is not a folder: name one for the format `dataset`")
    data = folder / "data"
    report = await export_run(store, run_id, "sft", data / "sft.jsonl")
    episodes, _ = await scan_run(store, run_id)
    if not episodes:
        return replace(report, path=folder, written=0)
    lines = [json.dumps(_row(one)) + "\n" for one in episodes]
    (data / "rollouts.jsonl").write_text("".join(lines))
    if report.written:
        _text_of_tools(data / "sft.jsonl")
    else:
        (data / "sft.jsonl").unlink(missing_ok=True)
    names = ["rollouts", *(["sft"] if report.written else [])]
    (folder / "README.md").write_text(_card(run_id, episodes, names))
    return replace(report, path=folder, written=len(episodes))


def push(folder: Path, repository: str) -> str:
    """Upload the folder as `owner/name`, private if it is new, and return its URL.

    Raises: MissingDependency; ConfigurationError with the hub's message.
    """
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MissingDependency(
            f"--push needs huggingface_hub: {command_for_packages('huggingface_hub')}"
        ) from None
    kept = f"{folder} was written but not pushed to {repository}"
    if away := hub_unreachable_reason():
        raise ConfigurationError(f"{kept}: {away}; check the network, HTTPS_PROXY or HF_ENDPOINT")
    api = HfApi()
    try:
        api.create_repo(repository, repo_type="dataset", private=True, exist_ok=True)
        pushed = api.upload_folder(repo_id=repository, repo_type="dataset", folder_path=str(folder))
    except Exception as error:  # the library raises many types
        said = getattr(error, "server_message", None) or str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"{kept}: {said}; run `hf auth login`, or set HF_TOKEN to a token with write access"
        ) from error
    return str(pushed)


def _row(episode: Episode) -> dict[str, Any]:
    row = episode.model_dump(mode="json", include=COLUMNS)
    failure = episode.failure
    told = f"{failure.boundary.value}: {failure.message}" if failure else None
    return {**row, **episode.audit(), "model": ", ".join(episode.models), "failure": told}


def _text_of_tools(file: Path) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    texts = [json.dumps({**line, "tools": json.dumps(line["tools"])}) + "\n" for line in lines]
    file.write_text("".join(texts))


def _card(run_id: str, episodes: list[Episode], names: list[str]) -> str:
    return CARD.format(
        configs="".join(CONFIG.format(name=name) for name in names[:1])
        + DEFAULT
        + "".join(CONFIG.format(name=name) for name in names[1:]),
        run_id=run_id,
        rollouts=len(episodes),
        agents=", ".join(sorted({one.agent for one in episodes})),
        models=", ".join(sorted({name for one in episodes for name in one.models})) or "none",
        instances=len({one.instance for one in episodes}),
        datasets=", ".join(sorted({one.instance.split("/", 1)[0] for one in episodes})),
        resolved=sum(one.outcome == "resolved" for one in episodes),
        exposed=sum(one.verification == "exposed" for one in episodes),
        version=", ".join(sorted({one.provenance.perdure_version for one in episodes})),
    )
