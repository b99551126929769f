"""A gateway process starts without what nothing in it uses."""

import subprocess
import sys

PROGRAM = """
import sys
from perdure.gateway.__main__ import leave_out_what_is_unused
leave_out_what_is_unused()
import perdure.gateway.http.server
assert "numpy" not in sys.modules  # renderers need it, and engines that take tokens
from perdure.gateway.rendering.formats import load_format
load_format("qwen3", "auto")
print(*sys.modules)
"""


def test_a_gateway_imports_neither_the_openai_sdk_nor_what_draws_on_terminals() -> None:
    """It renders with the packaged tokenizer, whose format is a class of `renderers`."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True, timeout=240
    )
    modules = done.stdout.split()

    assert "renderers.base" in modules
    assert not {"openai", "rich", "pygments"} & set(modules)
