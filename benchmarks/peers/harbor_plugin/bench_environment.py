"""Runs inside Harbor's own Python: a bubblewrap environment, one host folder per sandbox."""

# mypy: ignore-errors
# Harbor is importable only in its own environment.

import asyncio
import json
import os
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

FLAGS = json.loads(os.environ.get("BENCH_BWRAP", "[]"))


class BwrapEnvironment(BaseEnvironment):
    """/app is a clone of the repository, Harbor's mounts are bound, and every exec runs one bwrap."""

    box: Path

    @staticmethod
    def type() -> str:
        return "bench-bwrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(mounted=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self.box = Path(tempfile.mkdtemp(prefix="harbor-box-"))
        for name in ("app", "tests", "logs"):
            (self.box / name).mkdir()
        await self.exec("git clone -q /repo .")

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.box, ignore_errors=True)

    def _binds(self) -> list[str]:
        flags = [
            "--bind",
            str(self.box / "app"),
            "/app",
            "--bind",
            str(self.box / "tests"),
            "/tests",
        ]
        flags += ["--bind", str(self.box / "logs"), "/logs"]
        for mount in self._mounts:
            flags += ["--bind", mount["source"], mount["target"]]
        return flags

    def _host_path(self, path: str) -> Path:
        for mount in sorted(self._mounts, key=lambda m: len(m["target"]), reverse=True):
            if Path(path).is_relative_to(mount["target"]):
                return Path(mount["source"]) / Path(path).relative_to(mount["target"])
        return self.box / path.lstrip("/")

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        variables = [
            part for item in (self._merge_env(env) or {}).items() for part in ("--setenv", *item)
        ]
        process = await asyncio.create_subprocess_exec(
            "bwrap",
            *FLAGS,
            *self._binds(),
            *variables,
            "--chdir",
            cwd or "/app",
            "bash",
            "-c",
            command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(timeout_sec):
            out, err = await process.communicate()
        return ExecResult(
            stdout=out.decode("utf-8", "replace"),
            stderr=err.decode("utf-8", "replace"),
            return_code=process.returncode or 0,
        )

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        target = self._host_path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source_path, target)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(source_dir, self._host_path(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self._host_path(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        shutil.copytree(self._host_path(source_dir), target_dir, dirs_exist_ok=True)
