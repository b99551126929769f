"""Which cause the end of an engine server's log gives; the texts are those of vLLM 0.32."""

import pytest

from perdure.serving.engine_exit_causes import exit_cause
from perdure.serving.replica_plan import EnginePlan

PYDANTIC = "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
NEEDED = (
    "(EngineCore pid=134) ERROR 11-21 09:53:35 [core.py:1510] ValueError: To serve at least one "
    "request with the model's max seq len (1000000), (1.91 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (1.0 GiB). "
)
FITS = "Based on the available memory, the estimated maximum model length is 524160. Try increas"
ENDED = "RuntimeError: Engine core initialization failed. See root cause above.\n"


@pytest.mark.parametrize(
    ("said", "told", "final"),
    [
        (
            "ValueError: No available memory for the cache blocks. Try increasing",
            "KV cache for 0 sequences; use more GPUs per replica",
            True,
        ),
        (
            NEEDED + FITS,
            "of --max-model-len 1000000 (1.91 GiB needed, 1.0 GiB free); lower it to 524160, or use",
            True,
        ),
        (NEEDED + "Try increasing", "(1.91 GiB needed, 1.0 GiB free); lower it, or use", True),
        (
            f"{PYDANTIC}  Value error, User-specified max_model_len (4000000) is greater than the "
            "derived max_model_len (max_position_embeddings=32768.0 or model_max_length=None in",
            "--max-model-len 4000000 exceeds the model's maximum of 32768 tokens",
            True,
        ),
        (
            "RuntimeError: Worker failed with error 'Available memory on node 0 (16.36/18.71 GiB) on "
            "kv cache allocation is less than requested memory for kv (60.0 GiB). Decrease",
            "less than 60.0 GiB for the KV cache: lower VLLM_CPU_KVCACHE_SPACE",
            True,
        ),
        (
            "ValueError: Free memory on device cuda:0 (3.1/79.2 GiB) on startup is less than desired",
            "another process uses part of the memory",
            False,
        ),
        ("torch.OutOfMemoryError: CUDA out of memory.", "out of GPU memory", True),
        (
            "Value error, Total number of attention heads (4) must be divisible by tensor parallel "
            "size (3). [type=value_error",
            "4 attention heads cannot be split over 3 GPUs",
            True,
        ),
        (
            "ValueError: World size (8) is larger than the number of available GPUs (4) in this node",
            "8 GPUs are needed and the replica sees 4",
            True,
        ),
        ("RuntimeError: Failed to infer device type, please set", "finds no GPU", True),
        ("OSError: [Errno 98] error while attempting to bind", "took the port", False),
        ("Invalid repository ID or local directory specified: 'm'", "model not found: m", True),
        ("errors.HFValidationError: Repo id must use alphanumeric chars", "not found: m", True),
        ("LocalEntryNotFoundError: Cannot find an appropriate cached", "not found: m", True),
        (
            " - For Hugging Face models: ensure the presence of a 'config.json'.",
            "not found: m",
            True,
        ),
        ("RuntimeError: Cannot find any model weights with `/m`", "no weights in m", True),
        ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", "HF_TOKEN", True),
        (
            "vllm: error: unrecognized arguments: --wings 3",
            "does not know the argument --wings 3",
            True,
        ),
        (
            "vllm serve: error: argument --max-model-len: invalid human_readable_int_or_auto value",
            "refuses argument --max-model-len: invalid",
            True,
        ),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
            "KV",
            True,
        ),
        (f"ValueError: the true one\n{ENDED}  warnings.warn('leaked')", "3: the true one", False),
        ("something new\n", "status 3; its last line: something new", False),
    ],
)
def test_the_end_of_a_log_becomes_a_cause(said: str, told: str, final: bool) -> None:
    """A start that can never succeed is final, with what to change; any other is tried again."""
    found = exit_cause(EnginePlan(model="m"), 3, said)

    assert (told in found.text, found.final) == (True, final), found.text


def test_a_kill_names_its_likely_cause() -> None:
    """The log does not explain signal 9; most often the kernel ran out of memory."""
    found = exit_cause(EnginePlan(model="m"), 137, "INFO loading\n")

    assert ("out of memory" in found.text, found.final) == (True, False)
