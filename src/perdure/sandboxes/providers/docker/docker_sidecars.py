"""The sidecars of one docker sandbox.

They join the network of the sandbox's container, and the pid namespace of a container of their own,
whose first process ends when the sandbox's does. So the kernel ends them at the sandbox's deadline,
and the agent's commands can neither see nor signal their processes.
"""

from collections.abc import Mapping

from perdure.errors import ControlPlaneError, SandboxLost
from perdure.sandboxes.guest.container_options import ROOT, source_of
from perdure.sandboxes.guest.guest_sandbox import FOLDER
from perdure.sandboxes.guest.service_retries import Conflict, Missing, retry_transient
from perdure.sandboxes.providers.docker import docker_cli
from perdure.sandboxes.providers.docker.docker_run import folder_options
from perdure.sandboxes.sidecar_boot import (
    LOG_LINES,
    LOG_OPTIONS,
    SidecarEngine,
    SidecarState,
    common_options,
    image_healthcheck,
    limits_of,
)
from perdure.types import Healthcheck, Limits, Sidecar

START_S = 300.0
REQUEST_S = 60.0
FIRST_PROCESS = "_first-process"
"""In place of a sidecar's name, which never begins with an underscore."""
SIDECAR_LABEL = "perdure.sidecar"
LIVE = ("running", "created", "restarting")


class DockerSidecars(SidecarEngine):
    def __init__(
        self,
        sandbox: str,
        labels: Mapping[str, str],
        limits: Limits,
        images: Mapping[str, str],
        *,
        env: Mapping[str, str],
    ) -> None:
        """`sandbox`: its container. `images`: sidecar -> image id. `env`: variables of every
        sidecar."""
        self._sandbox, self._limits, self._images = sandbox, limits, images
        self._labels, self._env = labels, env

    def _container(self, name: str) -> str:
        return f"{self._sandbox}.{name}"

    async def start_first_process(self, image: str) -> None:
        """`image`: the sandbox's own, which has python3."""
        program = source_of("sidecars_init.py")
        await self._run(
            FIRST_PROCESS,
            *("--cap-drop", "ALL", "--cap-add", "DAC_OVERRIDE", "--user", ROOT),
            *("--security-opt", "no-new-privileges", "--log-driver", "none", "--pids-limit", "4"),
            *("--volumes-from", self._sandbox, "--entrypoint", "python3"),
            *(image, "-I", "-c", program, FOLDER),
        )

    async def start(self, name: str, sidecar: Sidecar) -> None:
        first, *rest = sidecar.entrypoint or (None,)
        command = sidecar.command or ()
        given = sidecar.model_copy(update={"env": {**self._env, **sidecar.env}})
        await self._run(
            name,
            *("--pid", f"container:{self._container(FIRST_PROCESS)}"),
            *common_options(given, limits_of(sidecar, self._limits)),
            *folder_options(self._sandbox, sidecar.folders),
            *("--log-driver", "json-file", *LOG_OPTIONS),
            *(("--entrypoint", first) if first else ()),
            *(self._images[name], *rest, *command),
        )

    async def _run(self, name: str, *options: str) -> None:
        container = self._container(name)
        labels = {**self._labels, SIDECAR_LABEL: name}
        marks = [part for pair in labels.items() for part in docker_cli.with_label(*pair)]

        async def run() -> None:
            try:
                await docker_cli.done(
                    *("run", "--detach", "--name", container, *marks, "--pull", "never"),
                    *("--network", f"container:{self._sandbox}", *options),
                    seconds=START_S,
                    what=f"run {name}",
                )
            except Conflict:  # another creator made it, or died before it started it
                await docker_cli.done("start", container, seconds=START_S)

        try:
            await retry_transient(run)
        except Missing as error:
            raise SandboxLost(f"docker container {self._sandbox} has ended: {error}") from error

    async def state(self, name: str) -> SidecarState:
        form = "{{.State.Status}} {{.State.ExitCode}}"
        try:
            said = await retry_transient(lambda: self._inspect(name, form))
        except Missing as error:
            raise SandboxLost(f"docker container {self._sandbox} has ended: {error}") from error
        status, code = said.split()
        return SidecarState(status in LIVE, int(code))

    async def _inspect(self, name: str, form: str) -> str:
        container = self._container(name)
        return await docker_cli.done(
            "container", "inspect", "--format", form, container, seconds=REQUEST_S, what="inspect"
        )

    async def healthcheck(self, name: str, sidecar: Sidecar) -> Healthcheck | None:
        if sidecar.healthcheck is not None or not sidecar.checks_health:
            return sidecar.healthcheck
        form = "{{json .Config.Healthcheck}}"
        return image_healthcheck(await retry_transient(lambda: self._inspect(name, form)))

    async def passes(self, name: str, check: Healthcheck) -> bool:
        try:
            said = await docker_cli.call(
                "exec", self._container(name), *check.command, seconds=check.timeout_s
            )
        except ControlPlaneError:
            return False
        return said.code == 0

    async def log(self, name: str) -> str:
        said = await docker_cli.call(
            "logs", "--tail", str(LOG_LINES), self._container(name), seconds=REQUEST_S
        )
        return (said.out.decode("utf-8", "replace") + said.err).strip()[-2000:]
