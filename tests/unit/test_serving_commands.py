"""Command lines of engine servers, and what their last words are taken to mean."""

import pytest

from perdure.serving.commands import EnginePlan, command_line, verdict


def test_each_boot_carries_its_generation_in_its_name() -> None:
    """A request that names the generation is refused by every other boot of the engine."""
    command = command_line(EnginePlan(model="m", gpus_per_replica=8), 17, "10.0.0.7", 8000)

    at = command.index("--served-model-name")
    assert command[at + 1 : at + 3] == ["policy-g17", "policy"]


def test_the_token_endpoint_is_asked_for() -> None:
    """Without these flags vLLM refuses token requests or records other logprobs than it sampled."""
    command = command_line(EnginePlan(model="m", gpus_per_replica=8), 1, "127.0.0.1", 8000)

    assert {"--enable-scale-out", "processed_logprobs", "--tensor-parallel-size"} <= {*command}


def test_peoples_words_come_last() -> None:
    """What a person adds overrides what is built here."""
    plan = EnginePlan(model="m", arguments=("--max-model-len", "65536"))

    assert command_line(plan, 1, "127.0.0.1", 8000)[-2:] == ["--max-model-len", "65536"]


def test_sglang_is_no_token_engine() -> None:
    """SGLang is served, and never joins the pool that is trained on."""
    plan = EnginePlan(model="m", server="sglang", gpus_per_replica=8)

    assert (command_line(plan, 1, "h", 1)[1:3], plan.joins_pool) == (
        ["-m", "sglang.launch_server"],
        False,
    )


@pytest.mark.parametrize(
    ("said", "told", "final"),
    [
        (
            "ValueError: No available memory for the cache blocks. Try increasing",
            "KV cache for 0 sequences",
            True,
        ),
        ("OSError: [Errno 98] error while attempting to bind", "port was taken", False),
        ("Invalid repository ID or local directory specified: 'm'", "model not found: m", True),
        ("vllm: error: unrecognized arguments: --wings", "no argument --wings", True),
        ("torch.OutOfMemoryError: CUDA out of memory.", "out of GPU memory", True),
        ("something new\n", "status 3; its last line: something new", False),
    ],
)
def test_the_last_words_become_a_verdict(said: str, told: str, final: bool) -> None:
    """A start that cannot succeed is told as such; any other is tried again."""
    found = verdict(EnginePlan(model="m"), 3, said)

    assert (told in found.text, found.final) == (True, final)
