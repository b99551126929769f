"""A gateway process starts without the openai SDK, which nothing in it uses."""

import subprocess
import sys

PROGRAM = """
import sys
from perdure.gateway.__main__ import leave_out_client_of_renderers
leave_out_client_of_renderers()
import perdure.gateway.http.server
from perdure.gateway.rendering.formats import load_format
load_format("qwen3", "auto")
print(*sys.modules)
"""


def test_a_gateway_does_not_import_the_openai_sdk() -> None:
    """It renders with the packaged tokenizer, whose format is a class of `renderers`."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True, timeout=240
    )
    modules = done.stdout.split()

    assert "renderers.base" in modules
    assert "openai" not in modules
