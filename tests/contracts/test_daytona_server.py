"""The Daytona double also answers calls of the unmodified SDK that our provider does not use."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from perdure.sandboxes.providers.daytona.daytona_client import client
from tests.service_harness import DAYTONA, serving


@pytest.fixture
async def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """A sandbox of the SDK, in a double of its own."""
    async with serving(DAYTONA, tmp_path / "server", monkeypatch):
        made = await (await client()).create()
        yield made
        await made.delete()


async def run(sandbox: Any, command: str) -> str:
    from daytona import SessionExecuteRequest

    request = SessionExecuteRequest(command=command, run_async=True)
    answer = await sandbox.process.execute_session_command("s", request)
    return str(answer.cmd_id)


async def code(sandbox: Any, command_id: str) -> int:
    """Waits for the command's end. If the code's file exists and is still empty, reads it again."""
    from daytona import DaytonaError

    while True:
        try:
            found = await sandbox.process.get_session_command("s", command_id)
        except DaytonaError as error:
            if "failed to convert exit code" not in str(error):
                raise
            continue
        if found.exit_code is not None:
            return int(found.exit_code)
        await asyncio.sleep(0.01)


async def test_session_is_one_shell(sandbox: Any) -> None:
    """Commands of a session share a shell. Each has its own exit code and both streams."""
    await sandbox.process.create_session("s")
    await code(sandbox, await run(sandbox, "cd /tmp; A=1"))
    command = await run(sandbox, "echo $A $PWD; echo no >&2; false")
    seen = await code(sandbox, command)
    logs = await sandbox.process.get_session_command_logs("s", command)

    assert (seen, logs.stdout, logs.stderr) == (1, "1 /tmp\n", "no\n")


async def test_logs_are_followed_to_the_end(sandbox: Any) -> None:
    """A follower gets the two streams separately, and ends with the command."""
    await sandbox.process.create_session("s")
    command = await run(sandbox, "echo one; sleep 0.2; echo two >&2")
    heard: list[tuple[str, str]] = []
    await sandbox.process.get_session_command_logs_async(
        "s", command, lambda t: heard.append(("out", t)), lambda t: heard.append(("err", t))
    )

    assert heard == [("out", "one\n"), ("err", "two\n")]


async def test_code_that_is_just_being_written_ends_no_follower(sandbox: Any) -> None:
    """A command's code file is empty for a moment before it is written: no reader fails."""
    await sandbox.process.create_session("s")
    command = await run(sandbox, ': >"${BASH_SOURCE%/*}/code"; sleep 0.2; echo one')
    heard: list[str] = []
    await sandbox.process.get_session_command_logs_async("s", command, heard.append, heard.append)

    assert heard == ["one\n"]


async def test_exit_ends_the_shell_and_no_code_comes(sandbox: Any) -> None:
    """After `exit` in a session, a command's exit code never appears, as with the real daemon."""
    await sandbox.process.create_session("s")
    command = await run(sandbox, "echo $$ >/tmp/shell; exit 3")
    gone = "[ -s /tmp/shell ] && ! kill -0 $(cat /tmp/shell)"
    while (await sandbox.process.exec(gone)).exit_code:
        await asyncio.sleep(0.01)
    found = await sandbox.process.get_session_command("s", command)

    assert found.exit_code is None


async def test_files_go_both_ways(sandbox: Any) -> None:
    """Upload, info, list, move and download work on a file; a missing file is an error."""
    from daytona import DaytonaError

    data = bytes(range(256)) * 9000
    await sandbox.fs.create_folder("/tmp/d", "755")
    await sandbox.fs.upload_file(data, "/tmp/d/a")
    await sandbox.fs.move_files("/tmp/d/a", "/tmp/d/b")
    names = [entry.name for entry in await sandbox.fs.list_files("/tmp/d")]
    size = (await sandbox.fs.get_file_info("/tmp/d/b")).size
    with pytest.raises(DaytonaError, match="not found"):
        await sandbox.fs.download_file("/tmp/d/a")

    assert (names, size, await sandbox.fs.download_file("/tmp/d/b")) == (["b"], len(data), data)


async def test_execute_ends_at_its_time(sandbox: Any) -> None:
    """A command that takes too long is ended, and answered 408."""
    from daytona import DaytonaTimeoutError

    with pytest.raises(DaytonaTimeoutError):
        await sandbox.process.exec("sleep 600", timeout=1)
