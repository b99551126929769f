"""A row's own parser is confined, because it reads output of hostile code."""

import os
import socket
from pathlib import Path

import pytest

from perdure.errors import MissingDependency
from perdure.graders.protocols import row_parser
from perdure.graders.protocols.row_parser import parse_output
from perdure.limited_process import Unparsable, read
from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider
from perdure.settings.settings_tree import Settings
from perdure.types import TestStatus

PROGRAM = """
import json, os, socket, sys
from pathlib import Path

def works(act):
    try:
        act()
        return "PASSED"
    except OSError:
        return "FAILED"

found = {{
    "reads both streams": works(lambda: [Path(name).read_bytes() for name in sys.argv[1:3]]),
    "reads a file of the worker": works(lambda: Path({secret!r}).read_text()),
    "calls a port of the worker": works(lambda: socket.create_connection(("127.0.0.1", {port}), 5)),
    "signals the worker": works(lambda: os.kill({pid}, 0)),
    "has a variable": "PASSED" if set(os.environ) - {{"PWD", "LC_CTYPE"}} else "FAILED",
}}
tests = [{{"name": name, "status": status}} for name, status in found.items()]
Path(sys.argv[3]).write_text(json.dumps({{"tests": tests}}))
"""


@pytest.fixture(autouse=True)
def needs_bubblewrap(tmp_path: Path) -> None:
    if missing := BubblewrapProvider(Settings(home=tmp_path / "home")).check():
        pytest.skip("; ".join(missing))


async def test_it_sees_the_output_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reaches no file of the worker, no port, no process and no variable."""
    secret = tmp_path / "secret"
    secret.write_text("key")
    monkeypatch.setenv("PERDURE_SECRET", "key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = PROGRAM.format(secret=str(secret), port=port, pid=os.getpid())
        found = await read(parse_output, program, b"out", b"err")

    assert [name for name, status in found.items() if status is TestStatus.PASSED] == [
        "reads both streams"
    ]


async def test_a_parser_without_a_result_is_a_verdict() -> None:
    """The reason is its last output; a retry would end the same way."""
    with pytest.raises(Unparsable, match=r"(?s)the row's parser failed: .*ValueError: no log"):
        await read(parse_output, "raise ValueError('no log')", b"", b"")


def test_a_host_that_lets_no_bubblewrap_run_is_named_before_the_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the chart's pods, where a verdict would otherwise be retried without end."""
    row_parser.check.cache_clear()
    row_parser.check()
    refused = tmp_path / "bwrap"
    refused.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2; exit 1\n"
    )
    refused.chmod(0o755)
    monkeypatch.setattr(row_parser, "program_of_host", lambda _: str(refused))
    row_parser.check.cache_clear()

    with pytest.raises(MissingDependency, match=r"No permissions.* workers on hosts of their own"):
        row_parser.check()
