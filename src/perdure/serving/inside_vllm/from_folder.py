"""vLLM's side of `perdure.engines.weights.update.FromDisk`: each worker reads a checkpoint folder itself.

Only vLLM imports it, if `plugin` was chosen as its backend. `{"path": "/ckpt/8"}` is one update: a
Hugging Face checkpoint of the served model.
"""

# mypy: ignore-errors
# vLLM is installed with the engines, never with us.

import os
from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.inplace import reload_weights

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")


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
        if not any(name.endswith(WEIGHT_FILES) for name in os.listdir(update_info.path)):
            raise FileNotFoundError(f"no weights in {update_info.path}")
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
