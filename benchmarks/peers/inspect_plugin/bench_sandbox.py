"""Runs inside Inspect's own Python: a bubblewrap sandbox, one host folder per sample."""

# mypy: ignore-errors
# Inspect is importable only in its own environment.

import json
import os
import shutil
import tempfile
from pathlib import Path

from inspect_ai.util import (
    ExecResult,
    SandboxEnvironment,
    SandboxUnavailableError,
    sandboxenv,
    subprocess,
)

FLAGS = json.loads(os.environ.get("BENCH_BWRAP", "[]"))


@sandboxenv(name="bench-bwrap")
class BwrapSandbox(SandboxEnvironment):
    """/app is a clone of the repository, /root belongs to Inspect's checkpoints, and every exec runs one
    bwrap. Without its folder it fails as Inspect's Docker sandbox does without its container."""

    def __init__(self) -> None:
        self.box = Path(tempfile.mkdtemp(prefix="inspect-box-"))
        for name in ("app", "root"):
            (self.box / name).mkdir()

    @classmethod
    async def sample_init(cls, task_name, config, metadata) -> dict[str, SandboxEnvironment]:
        sandbox = cls()
        await sandbox.exec(["git", "clone", "-q", "/repo", "."])
        return {"default": sandbox}

    @classmethod
    async def sample_cleanup(cls, task_name, config, environments, interrupted) -> None:
        for environment in environments.values():
            shutil.rmtree(environment.as_type(BwrapSandbox).box, ignore_errors=True)

    async def exec(  # noqa: PLR0917 -- the signature of its base
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        flags = [*FLAGS, "--uid", "0", "--gid", "0"]
        for name in ("app", "root"):
            flags += ["--bind", str(self.box / name), f"/{name}"]
        for item in (env or {}).items():
            flags += ["--setenv", *item]
        argv = ["bwrap", *flags, "--chdir", cwd or "/app", *cmd]
        done = await subprocess(argv, input=input, timeout=timeout, concurrency=concurrency)
        if not done.success and not self.box.exists():
            raise SandboxUnavailableError("The sandbox is not running and cannot execute")
        return done

    async def write_file(self, file: str, contents: str | bytes) -> None:
        path = self._host_path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents.encode() if isinstance(contents, str) else contents)

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        path = self._host_path(file)
        return path.read_text() if text else path.read_bytes()

    def _host_path(self, file: str) -> Path:
        return self.box / str(Path("/app", file)).lstrip("/")
