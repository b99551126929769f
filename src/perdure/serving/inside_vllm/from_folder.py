"""vLLM's side of `perdure.engines.weights.update.FromDisk`: each worker reads a checkpoint folder itself.

Only vLLM imports it, if `plugin` was chosen as its backend. `{"path": "/ckpt/8"}` is one update: a
Hugging Face checkpoint of the served model.
"""

# mypy: ignore-errors
# vLLM is installed with the engines, never with us.

import os
from dataclasses import dataclass

import torch.distributed
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.inplace import reload_weights

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")
CANNOT_OPEN = "cannot open the checkpoint"
"""`NOTHING_READ` of `perdure.engines.weights.update` has these words: no tensor has changed."""


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing to connect."""


@dataclass
class Folder(WeightTransferUpdateInfo):
    """A folder that every worker of this engine can read."""

    path: str = ""


class FromFolder(WeightTransferEngine[NoInit, Folder]):
    """Loads in place into the running model, by vLLM's own loader."""

    init_info_cls = NoInit
    update_info_cls = Folder
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Folder) -> None:
        # vLLM's loader empties the tensors before it opens the folder: without this check, a wrong path
        # would leave the engine without weights.
        if problem := _of_any_worker(_problem(update_info.path)):
            raise FileNotFoundError(f"{CANNOT_OPEN}: {problem}")
        reload_weights(
            self.vllm_config,
            self.model,
            weights_iterator=None,
            weights_path=update_info.path,
            is_checkpoint_format=True,
        )

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def _problem(path: str) -> str:
    """What keeps this worker from reading the folder; empty: nothing."""
    try:
        files = [name for name in os.listdir(path) if name.endswith(WEIGHT_FILES)]
        for name in files:
            with open(os.path.join(path, name), "rb"):
                pass
    except OSError as error:
        return str(error)
    return "" if files else f"no weights in {path}"


def _of_any_worker(problem: str) -> str:
    """The first problem of all workers of this engine: if one cannot read, none begins."""
    world = get_world_group()
    problems = [""] * world.world_size
    torch.distributed.all_gather_object(problems, problem, group=world.cpu_group)
    return next(filter(None, problems), "")
