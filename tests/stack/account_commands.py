"""`perdure accounts`, on a private stack."""

import asyncio
import json
from typing import Any

import pytest

from perdure.cli.main import invoke
from tests.stack.running_stack import Stack


class AccountCommands:
    """Runs the commands in this process, with the stack's addresses."""

    def __init__(
        self, stack: Stack, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        patch.setenv("PERDURE_HOME", str(stack.home))
        patch.setenv("PERDURE_STORE", stack.store.url)
        patch.setenv("TEMPORAL_ADDRESS", stack.client.service_client.config.target_host)
        patch.setenv("TEMPORAL_NAMESPACE", stack.client.namespace)
        self._capsys = capsys

    async def run(self, command: str) -> Any:
        """The JSON that `perdure accounts COMMAND --json` prints."""
        self._capsys.readouterr()
        code = await asyncio.to_thread(invoke, ["accounts", command, "--json"])
        printed = self._capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)
