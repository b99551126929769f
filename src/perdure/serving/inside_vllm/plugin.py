"""Weights from a folder, for vLLM: `pip install --no-deps` of Perdure's wheel in the engine's environment, then
`vllm serve ... --weight-transfer-config '{"backend": "perdure-disk"}'`.

Runs inside vLLM and imports nothing of Perdure. Checked against vLLM 0.32.
"""

# mypy: ignore-errors
# vLLM is installed with the engines, never with us.

BACKEND = "perdure-disk"
MODULE = "perdure.serving.inside_vllm.from_folder"


def register() -> None:
    """The entry point: vLLM calls it in each of its processes, some more than once."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return  # a vLLM without weight transfer: it reports itself that the backend is unknown

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, MODULE, "FromFolder")
