"""vLLM's side of `perdure.engines.weights.weight_update.FromDisk`: each worker reads the checkpoint folder.

Only vLLM imports this module, if `plugin` is its weight transfer backend. `{"path": "/ckpt/8"}` is one
update: a Hugging Face checkpoint of the served model.
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
"""`perdure.engines.weights.weight_update.NOTHING_READ` contains these words: no tensor has changed."""


@dataclass
class NoInit(WeightTransferInitInfo):
    """This backend connects to nothing."""


@dataclass
class Folder(WeightTransferUpdateInfo):
    """A folder that every worker of this engine can read."""

    path: str = ""


class FolderWeightTransferEngine(WeightTransferEngine[NoInit, Folder]):
    """Loads a checkpoint into the running model, with vLLM's own loader."""

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
        # vLLM's loader empties the tensors before it opens the folder. Without this check, a wrong
        # path would leave the engine without weights.
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
    """Why this worker cannot read the folder; empty if it can."""
    try:
        files = [name for name in os.listdir(path) if name.endswith(WEIGHT_FILES)]
        for name in files:
            with open(os.path.join(path, name), "rb"):
                pass
    except OSError as error:
        return str(error)
    return "" if files else f"no weights in {path}"


def _of_any_worker(problem: str) -> str:
    """The first problem among all workers of this engine: if one cannot read, none starts."""
    world = get_world_group()
    problems = [""] * world.world_size
    torch.distributed.all_gather_object(problems, problem, group=world.cpu_group)
    return next(filter(None, problems), "")
