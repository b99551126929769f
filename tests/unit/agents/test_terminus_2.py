"""Terminus 2's settings."""

import json

from perdure.agents.base import HOME
from perdure.agents.python_runner import KEY
from perdure.agents.terminus_2 import Terminus2
from tests.unit.agents.headless_task import TASK, with_options


def test_its_settings_name_the_gateway_and_the_window() -> None:
    """Our address, the rollout's limits, and a timeout longer than the budget; the key only in the
    environment, because it writes its settings into the trajectory."""
    launch = Terminus2().launch(with_options(max_turns=7, parser="xml"))
    file = launch.files[f"{HOME}/terminus_2.json"]
    settings = json.loads(file)
    model, call = settings["model_info"], settings["llm_call_kwargs"]

    assert settings["model_name"] == "openai/policy"
    assert settings["api_base"] == "http://127.0.0.1:18001/v1"
    assert (model["max_input_tokens"], call["max_tokens"]) == (50_000, 2000)
    assert call["timeout"] > TASK.budget_s
    assert call["extra_headers"] == TASK.headers
    assert (settings["max_turns"], settings["parser_name"]) == (7, "xml")
    assert launch.env[KEY] == TASK.session_key
    assert TASK.session_key.encode() not in file
