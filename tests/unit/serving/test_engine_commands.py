"""Command lines of engine servers."""

from perdure.serving.engine_commands import command_line
from perdure.serving.replica_plan import EnginePlan


def test_each_start_has_its_generation_in_its_model_name() -> None:
    """A request that names the generation is refused by every other start of the engine."""
    command = command_line(EnginePlan(model="m", gpus_per_replica=8), 17, "10.0.0.7", 8000)

    at = command.index("--served-model-name")
    assert command[at + 1 : at + 3] == ["policy-g17", "policy"]


def test_the_flags_of_the_token_endpoint_are_there() -> None:
    """Without these flags vLLM refuses token requests or records other logprobs than it sampled."""
    command = command_line(EnginePlan(model="m", gpus_per_replica=8), 1, "127.0.0.1", 8000)

    assert {"--enable-scale-out", "processed_logprobs", "--tensor-parallel-size"} <= {*command}


def test_arguments_of_the_user_come_last() -> None:
    """Arguments of the user override those of Perdure."""
    plan = EnginePlan(model="m", arguments=("--max-model-len", "65536"))

    assert command_line(plan, 1, "127.0.0.1", 8000)[-2:] == ["--max-model-len", "65536"]


def test_sglang_serves_the_name_of_its_start() -> None:
    """It serves one name only, which tells this start from the next."""
    command = command_line(EnginePlan(model="m", server="sglang", gpus_per_replica=8), 17, "h", 1)

    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert command[command.index("--served-model-name") + 1] == "policy-g17"
