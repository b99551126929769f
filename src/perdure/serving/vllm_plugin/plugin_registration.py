"""A vLLM plugin that loads weights from a folder.

Install Perdure's wheel into the engine's environment with `pip install --no-deps`, then run
`vllm serve ... --weight-transfer-config '{"backend": "perdure-disk"}'`. The plugin runs inside vLLM and
imports nothing from Perdure. Checked against vLLM 0.32.
"""

# mypy: ignore-errors
# vLLM is installed with the engines, never with us.

BACKEND = "perdure-disk"
MODULE = "perdure.serving.vllm_plugin.folder_weights"


def register() -> None:
    """The entry point: vLLM calls it in each of its processes, some more than once."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # a vLLM without weight transfer reports itself that the backend is unknown

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, MODULE, "FolderWeightTransferEngine")
