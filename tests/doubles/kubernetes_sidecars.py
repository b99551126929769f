"""The init containers of the Kubernetes double's pods: ordinary ones and native sidecars, with startup
probes, restarts, logs, shared folders and host aliases.

Each is a box that shares the network of its pod's main box. Its command runs as the API would expand
it. Not played: images (a container without `command` runs its `args`), users, resources.
"""

import asyncio
import contextlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from perdure.errors import NotFound, SandboxLost
from perdure.sandboxes.base import Exec, ExecState, ExecStatus, Mount, SandboxSpec
from perdure.sandboxes.host.namespaces import NamespaceSandbox
from tests.doubles.service_double import LIMITS, Guests

RUN = "main"
"""The exec id of a container's own command in its box."""
NETWORK_OF = "network_of"
"""Label of a box: the process whose network it joins."""
CONTAINER_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
BACK_OFF_S = 0.2
"""The kubelet's pause before a restart; a real one is 10 s and more."""


def invalid_field(spec: Mapping[str, Any]) -> str:
    """The field that the API refuses; empty if there is none."""
    volumes = {volume["name"] for volume in spec.get("volumes") or ()}
    names: set[str] = set()
    for kind in ("initContainers", "containers"):
        for at, container in enumerate(spec.get(kind) or ()):
            where, name = f"spec.{kind}[{at}]", container.get("name", "")
            if not CONTAINER_NAME.fullmatch(name) or name in names or not container.get("image"):
                return f"{where}.name"
            names.add(name)
            if any(one["name"] not in volumes for one in container.get("volumeMounts") or ()):
                return f"{where}.volumeMounts"
            if container.get("restartPolicy", "Always") != "Always":
                return f"{where}.restartPolicy"
            if kind == "containers" and "restartPolicy" in container:
                return f"{where}.restartPolicy"
            if "startupProbe" in container and "restartPolicy" not in container and kind[0] == "i":
                return f"{where}.startupProbe"
            times = (container.get("startupProbe") or {}).items()
            if any(name != "exec" and (type(one) is not int or one < 1) for name, one in times):
                return f"{where}.startupProbe"
    for alias in spec.get("hostAliases") or ():
        if not all(map(HOST_NAME.fullmatch, alias["hostnames"])):
            return "spec.hostAliases.hostnames"
    return ""


def argv_of(container: Mapping[str, Any]) -> list[str]:
    given = [*container.get("command", ()), *container.get("args", ())]
    return [expanded(one, variables(container)) for one in given] or ["sleep", "infinity"]


def variables(container: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in container.get("env") or ():
        found[one["name"]] = expanded(one["value"], found)
    return found


def expanded(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` becomes its value, if there is one, and `$$` becomes `$`."""

    def one(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else values.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)


class InitContainers:
    """Those of one pod. `note` merges a container's status into the pod."""

    def __init__(
        self, guests: Guests, folder: Path, uid: str, note: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self._guests, self._folder, self._uid, self._note = guests, folder, uid, note

    def mounts(self, spec: Mapping[str, Any], container: Mapping[str, Any]) -> tuple[Mount, ...]:
        """The shared volumes of any container of the pod, and its /etc/hosts."""
        if not spec.get("initContainers"):
            return ()
        hosts = self._folder / "hosts"
        if not hosts.exists():
            lines = [f"{one['ip']} {' '.join(one['hostnames'])}" for one in spec["hostAliases"]]
            self._folder.mkdir(parents=True)
            hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        users = [
            mount["name"]
            for kind in ("initContainers", "containers")
            for one in spec[kind]
            for mount in one.get("volumeMounts") or ()
        ]
        found = [Mount(hosts, "/etc/hosts")]
        for mount in container.get("volumeMounts") or ():
            if users.count(mount["name"]) > 1:
                volume = self._folder / mount["name"]
                volume.mkdir(exist_ok=True)
                volume.chmod(0o777)
                found.append(Mount(volume, mount["mountPath"], not mount.get("readOnly", False)))
        return tuple(found)

    async def start(self, spec: Mapping[str, Any], main: NamespaceSandbox) -> bool:
        """Whether all are up, or have done their job."""
        for container in spec.get("initContainers") or ():
            name = container["name"]
            restarts = 0
            box = await self._run(spec, container, main, restarts)
            while not await self._is_up(container, box):
                ended = await self._ended(box)
                if ended is None:
                    await box.kill()
                    ended = {"exitCode": 137, "reason": "Error"}
                if "restartPolicy" not in container:
                    self._note(name, {"state": {"terminated": ended}, "restartCount": 0})
                    if ended["exitCode"]:
                        return False
                    break
                restarts += 1
                box = await self._run(spec, container, main, restarts, ended)
        return True

    async def _run(
        self,
        spec: Mapping[str, Any],
        container: Mapping[str, Any],
        main: NamespaceSandbox,
        restarts: int,
        ended: Mapping[str, Any] | None = None,
    ) -> NamespaceSandbox:
        if ended is not None:
            back_off = {"waiting": {"reason": "CrashLoopBackOff"}}
            last = {"lastState": {"terminated": ended}, "restartCount": restarts - 1}
            self._note(container["name"], {"state": back_off, "started": False, **last})
            await asyncio.sleep(BACK_OFF_S)
        holder = main.box.booted.holder
        assert holder is not None
        wanted = SandboxSpec(
            workdir="/home/agent",
            env=variables(container),
            limits=LIMITS,
            labels={NETWORK_OF: str(holder.pid)},
            mounts=self.mounts(spec, container),
            ttl_s=30 * 86400,
        )
        made = await self._guests.create(wanted, self._box(container["name"], restarts))
        assert isinstance(made, NamespaceSandbox)
        folder = container.get("workingDir") or "/"
        await made.start(RUN, Exec(argv_of(container), cwd=folder))
        self._note(
            container["name"],
            {"state": {"running": {}}, "restartCount": restarts, "started": False}
            | ({"lastState": {"terminated": ended}} if ended else {}),
        )
        return made

    async def _is_up(self, container: Mapping[str, Any], box: NamespaceSandbox) -> bool:
        """Waits. False: it ended, or its probe failed too often."""
        if "restartPolicy" not in container:
            await box.wait(RUN)
            return False
        probe = container.get("startupProbe")
        for _ in range(probe["failureThreshold"] if probe else 1):
            if await self._ended(box) is not None:
                return False
            if probe is None or await self._passes(container, probe, box):
                self._note(container["name"], {"started": True})
                return True
            await asyncio.sleep(min(0.1, probe["periodSeconds"]))  # a quicker clock
        return False

    async def _passes(
        self, container: Mapping[str, Any], probe: Mapping[str, Any], box: NamespaceSandbox
    ) -> bool:
        command = [expanded(one, variables(container)) for one in probe["exec"]["command"]]
        with contextlib.suppress(SandboxLost):
            return (await box.exec(command, timeout=probe["timeoutSeconds"])).status.ok
        return False

    async def _ended(self, box: NamespaceSandbox | None) -> dict[str, Any] | None:
        """What the kubelet reports of a container whose command is over."""
        status = ExecStatus(ExecState.LOST)
        if box is not None:
            with contextlib.suppress(NotFound, SandboxLost):
                status = await box.poll(RUN)
        if not status.done:
            return None
        code = status.code if status.code is not None else 137
        return {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}

    async def look_after(
        self, spec: Mapping[str, Any], statuses: Sequence[Mapping[str, Any]], main: NamespaceSandbox
    ) -> None:
        """Start native sidecars again that have ended."""
        restarts = {one["name"]: one.get("restartCount", 0) for one in statuses}
        for container in spec.get("initContainers") or ():
            count = restarts[container["name"]]
            box = await self._guests.found(self._box(container["name"], count))
            ended = await self._ended(box) if "restartPolicy" in container else None
            if ended is not None:
                await self._run(spec, container, main, count + 1, ended)

    async def log(self, name: str, restarts: int) -> bytes:
        box = await self._guests.attach(self._box(name, restarts))
        return await box.output(RUN) + await box.output(RUN, "stderr")

    async def remove(self) -> None:
        for info in await self._guests.list({}):
            if info.identity.startswith(f"{self._uid[:23]}-"):
                await self._guests.kill(info.identity)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _box(self, name: str, restarts: int) -> str:
        return f"{self._uid[:23]}-{name[:30]}-{restarts}"


def status_of(container: Mapping[str, Any]) -> dict[str, Any]:
    said = {"name": container["name"], "image": container["image"], "imageID": "", "ready": False}
    return {**said, "restartCount": 0, "state": {"waiting": {"reason": "PodInitializing"}}}
