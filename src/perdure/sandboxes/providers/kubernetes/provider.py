"""The `kubernetes` provider: one bare pod per sandbox, in a namespace of any cluster.

The identity is part of the pod's name, so the API makes it once. The guest program runs commands and
keeps their records. Orders reach it over the pod's exec socket, on standard input, so that no URL
shows them. `pods` builds the pod and reads its state.
"""

import asyncio
import contextlib
import hashlib
import json
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    InstanceError,
    NotFound,
    PerdureError,
    RateLimited,
    SandboxLost,
)
from perdure.sandboxes import image_names
from perdure.sandboxes.agent_user import ROOT_VARIABLES
from perdure.sandboxes.base import (
    Exec,
    ExecResult,
    ExecStatus,
    Network,
    Sandbox,
    SandboxInfo,
    SandboxSpec,
)
from perdure.sandboxes.guest.container_options import (
    ContainerSandbox,
    missing_programs_error,
    names_missing_program,
)
from perdure.sandboxes.guest.guest_sandbox import MARK
from perdure.sandboxes.guest.service_provider import ServiceProvider
from perdure.sandboxes.guest.service_retries import (
    Conflict,
    Missing,
    retry_transient,
    sandbox_lost_error,
    was_refused,
)
from perdure.sandboxes.providers.kubernetes import (
    kubernetes_client,
    kubernetes_errors,
    pod_sidecars,
    pods,
)
from perdure.sandboxes.providers.kubernetes.pod_boot_wait import BootWait
from perdure.sandboxes.providers.kubernetes.pods import Pod
from perdure.sandboxes.sidecar_boot import LOG_LINES, SidecarFailed
from perdure.sandboxes.spec_validation import check_identity
from perdure.settings.settings_tree import Settings
from perdure.types import AccountCaps, Sidecar

T = TypeVar("T")

UPLOAD_BYTES_PER_S = 1_000_000
"""Speed of the slowest link on which an upload does not time out."""
LOOK_S = (0.1, 1.0)
"""The first and the longest pause between two looks at a pod, in seconds."""
GONE_S = 30.0
"""Seconds after a delete until a pod that still exists is removed without its node."""
SILENT_S = 600.0
"""Seconds without an answer after which a running pod counts as lost."""
CLOSED_S = 10.0
"""Seconds that the network plugin may take to close a new pod's network."""
LOOK = """
import json, os, socket, sys
reached = None
if sys.argv[1] == "closed" and os.environ.get("KUBERNETES_SERVICE_HOST"):
    place = os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])
    try:
        socket.create_connection(place, 3).close()
        reached = True
    except OSError:
        reached = False
print("\\nperdure-answer:" + json.dumps({"env": dict(os.environ), "reached": reached}))
"""
"""Runs inside: prints the image's variables, and whether the API server's address answers."""


class KubernetesSandbox(ContainerSandbox):
    service = "Kubernetes"

    def __init__(self, provider: "KubernetesProvider", pod: Pod) -> None:
        own, identity = pods.own_spec(pod), pods.annotation(pod, pods.IDENTITY)
        super().__init__(identity, own["workdir"], packs=provider.root / "packs")
        self.provider, self.name = provider, str(pod["metadata"]["name"])
        self.uid = str(pod["metadata"]["uid"])
        self._variables: Mapping[str, str] = {}
        self._has_sidecars = bool(own.get("sidecars"))

    async def poll(self, exec_id: str) -> ExecStatus:
        return await self._proven(await super().poll(exec_id))

    async def wait(self, exec_id: str, timeout_s: float | None = None) -> ExecStatus:
        return await self._proven(await super().wait(exec_id, timeout_s))

    async def _to_end(self, command: Exec) -> ExecResult:
        result = await super()._to_end(command)
        await self._proven(result.status)
        return result

    async def _proven(self, status: ExecStatus) -> ExecStatus:
        """The status, unless a sidecar ended before the command did: its result proves nothing then.
        A node reports that after about a second.

        Raises: SandboxLost.
        """
        if status.done and self._has_sidecars:
            await self._check_lives(None)
        return status

    async def _boot_sidecars(self, spec: SandboxSpec) -> None:
        """They are up: the sandbox's own container starts after them."""

    async def touch(self, ttl_s: float) -> None:
        await self._guest("touch", ttl=ttl_s)
        await self.provider.renew(self.identity, self.name, ttl_s)

    async def kill(self) -> None:
        await self.provider.kill(self.identity)

    async def set_up(self, spec: SandboxSpec) -> None:
        self._is_new = True
        self._variables = await retry_transient(lambda: self._look(spec))
        await super().set_up(spec)

    async def _look(self, spec: SandboxSpec) -> Mapping[str, str]:
        """The image's variables. Raises: ConfigurationError when the network should be closed but is
        open."""
        proven = spec.network is Network.HOST or self.provider.network_is_closed
        command = f"python3 -I -c {shlex.quote(LOOK)} {'any' if proven else 'closed'}"
        end = time.monotonic() + CLOSED_S
        while (found := await self._run("look", command))["reached"]:
            if time.monotonic() > end:
                raise self.provider.is_open(self.identity)
            await asyncio.sleep(LOOK_S[1])
        if not proven and found["reached"] is None:
            raise ConfigurationError(
                f"KUBERNETES_SERVICE_HOST is not set in sandbox {self.identity!r}, so Perdure cannot "
                "check that its network is closed; run sandboxes on nodes whose kubelet sets it"
            )
        if not proven:
            self.provider.network_is_closed = True
        who = {} if spec.image is None else ROOT_VARIABLES
        return {**who, **_of_image(found["env"])}

    # -- how the guest is reached -----------------------------------------------------------------

    async def _print(self, what: str, command: str, extra_s: float) -> str:
        """A shell reads the line from standard input: the cluster's audit log would show a URL."""
        given = command.encode()
        argv = ["sh", "-c", 'line=$(head -c "$1") && eval "$line"', "sh", str(len(given))]
        said = await self._exec(what, argv, [given], self.provider.request_s + extra_s)
        return said.out.decode("utf-8", "replace")

    async def _write_and_print(self, what: str, path: str, data: bytes | Path, command: str) -> str:
        """Send the line, then the data. `dd` reads the line without a byte of the data."""
        size = len(data) if isinstance(data, bytes) else data.stat().st_size
        line = '(umask 077; mkdir -p "${2%/*}" && head -c "$3" >"$2") && ' + command
        given = line.encode()
        reading = 'line=$(dd bs=1 count="$1" 2>/dev/null) && eval "$line"'
        argv = ["sh", "-c", reading, "sh", str(len(given)), path, str(size)]
        seconds = self.provider.request_s + size / UPLOAD_BYTES_PER_S
        said = await self._exec(what, argv, [given, data], seconds)
        return said.out.decode("utf-8", "replace")

    async def _exec(
        self, what: str, argv: Sequence[str], given: Sequence[bytes | Path], seconds: float
    ) -> kubernetes_client.CommandOutput:
        """Raises: SandboxLost if the API confirms it, or after a long silence."""
        try:
            said = await self.provider.run(what, self.name, argv, given, seconds)
        except (Missing, ControlPlaneError) as error:
            if was_refused(error):
                raise
            await self._check_lives(error)
            raise ControlPlaneError(str(error)) from error
        self.provider.silences.broken(self.uid)
        if said.code == 0 or MARK.encode() in said.out:
            return said
        if said.status is not None and (said.code == 127 or names_missing_program(said.words)):
            raise self._lacking(missing_programs_error(self.identity, said.words))
        await self._check_lives(None)
        raise ControlPlaneError(
            f"Kubernetes: {what}: the socket or the command failed: {said.words}"
        )

    async def _check_lives(self, error: PerdureError | None) -> None:
        """Raises: SandboxLost."""
        pod = await retry_transient(lambda: self.provider.find(self.identity))
        if pod is None or pod["metadata"]["uid"] != self.uid:
            raise sandbox_lost_error("kubernetes", self.identity) from error
        now = pods.state_of(pod)
        if now.state in ("going", "over"):
            raise sandbox_lost_error("kubernetes", self.identity, f"({now.why})") from error
        if error is not None and self.provider.silences.lasts(self.uid) > SILENT_S:
            why = f"(it runs, but has not answered for {SILENT_S:g} s: {error})"
            raise sandbox_lost_error("kubernetes", self.identity, why) from error


class KubernetesProvider(ServiceProvider):
    """`KUBECONFIG` names the cluster; without it, the worker's own is used. The setting
    `PERDURE_KUBERNETES__SCOPE` names the deployment, if several hosts share one or several share a
    namespace."""

    name = "kubernetes"
    downloads_to = "each node that lacks them"
    limits = frozenset({"memory_mb", "cpus", "disk_mb", "output_mb"})  # a node bounds processes
    account_caps = AccountCaps(starting=32)
    """Refusals show how many pods the namespace's quota and the nodes allow."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.network_is_closed = False
        """A sandbox has seen that it cannot reach the API server."""

    @property
    def namespace(self) -> str:
        return self.settings.kubernetes.namespace

    @property
    def _named_scope(self) -> str:
        return self.settings.kubernetes.scope

    @property
    def account(self) -> str:
        whose = f"{self.settings.kubernetes.context}\n{self.namespace}"
        return f"{self.name}-{hashlib.sha256(whose.encode()).hexdigest()[:8]}"

    @property
    def _scope(self) -> str:
        scope = super()._scope
        if not pods.LABEL_VALUE.fullmatch(scope):
            raise ConfigurationError(
                f"PERDURE_KUBERNETES__SCOPE {scope!r} must be 1 to 63 letters, digits, '-', '_' or '.'"
            )
        return scope

    def check(self) -> Sequence[str]:
        missing = self._missing_package("kubernetes-asyncio")
        for look in (
            kubernetes_client.configured,
            lambda: pods.cluster_fields(self.settings.kubernetes),
        ):
            try:
                look()
            except ConfigurationError as error:
                missing.append(str(error))
        return missing

    async def attach(self, identity: str) -> Sandbox:
        check_identity(identity)
        pod = await retry_transient(lambda: self.find(identity))
        if pod is None:
            raise NotFound(f"no kubernetes sandbox {identity!r}")
        return KubernetesSandbox(self, await self._up(pod, identity))

    async def _list(self, labels: Mapping[str, str]) -> Sequence[SandboxInfo]:
        selector = f"{pods.SCOPE}={self._scope}"
        found = await retry_transient(lambda: self._call("list", lambda it: it.listed(selector)))
        wanted = labels.items()
        infos = [self._info(pod) for pod in found if pods.annotation(pod, pods.SPEC)]
        return [info for info in infos if wanted <= info.labels.items()]

    def _info(self, pod: Pod) -> SandboxInfo:
        return SandboxInfo(
            identity=pods.annotation(pod, pods.IDENTITY),
            provider=self.name,
            alive=pods.state_of(pod).state in ("coming", "up"),
            created=_time(pod["metadata"]["creationTimestamp"]),
            expires=float(pods.annotation(pod, pods.EXPIRES) or 0),
            labels=pods.own_spec(pod)["labels"],
        )

    async def kill(self, identity: str) -> None:
        check_identity(identity)
        name = self._name(identity)
        with contextlib.suppress(Missing):
            pod = await retry_transient(
                lambda: self._call("delete", lambda it: it.delete(name, pods.GRACE_S))
            )
            await self._gone(name, pod["metadata"]["uid"])

    async def _gone(self, name: str, uid: str) -> None:
        """Wait until its node has ended the pod. If the node does not answer, delete it without the
        node.

        Raises: Missing when it is gone.
        """
        end, pause = time.monotonic() + GONE_S, LOOK_S[0]
        while time.monotonic() < end:
            pod = await retry_transient(lambda: self._call("get", lambda it: it.read(name)))
            if pod["metadata"]["uid"] != uid:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LOOK_S[1])
        await retry_transient(lambda: self._call("delete", lambda it: it.delete(name, 0)))

    # -- making -----------------------------------------------------------------------------------

    async def _create(self, spec: SandboxSpec, identity: str) -> KubernetesSandbox:
        pod = await retry_transient(lambda: self._settled(identity))
        if pod is None:
            pod = await self._make(spec, identity)
        try:
            box = KubernetesSandbox(self, await self._up(pod, identity))
        except SandboxLost:
            await self._report_sidecar(identity)
            raise
        try:
            await box.set_up(spec)
        except (ConfigurationError, InstanceError):
            await self.kill(identity)
            raise
        return box

    async def _report_sidecar(self, identity: str) -> None:
        """Kill a sandbox of which a sidecar failed: the next try starts with new ones.

        Raises: SidecarFailed.
        """
        pod = await retry_transient(lambda: self.find(identity))
        failed = None if pod is None else pods.sidecar_failure(pod)
        if failed is None:
            return
        name = self._name(identity)
        try:
            said = await self._call(
                "log",
                lambda it: it.log(name, failed.sidecar, lines=LOG_LINES, previous=failed.restarted),
            )
        except PerdureError as error:
            said = f"no log ({error})"
        await self.kill(identity)
        raise SidecarFailed(
            f"the sidecar {failed.sidecar!r} {failed.what}: {said.strip() or 'no output'}"
        )

    async def _settled(self, identity: str) -> Pod | None:
        """The pod of this name. Raises: ControlPlaneError while one of this name is being deleted."""
        pod = await self.find(identity)
        if pod is not None and pods.state_of(pod).state == "going":
            raise ControlPlaneError(f"pod {self._name(identity)} is still being deleted")
        return pod

    async def _make(self, spec: SandboxSpec, identity: str) -> Pod:
        """Create the pod. After a lost answer, a read by name shows whether it was created."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        wanted = self._pod(spec, identity)

        async def ask() -> Pod:
            try:
                return await self._call("create", lambda it: it.create(wanted))
            except Missing as error:
                raise ConfigurationError(
                    f"{error}; apply {kubernetes_errors.ROLE}, or name another namespace in PERDURE_KUBERNETES__NAMESPACE"
                ) from error
            except Conflict as error:
                if (found := await self._settled(identity)) is not None:
                    return found
                raise ControlPlaneError(str(error)) from error
            except RateLimited as error:
                if error.limit == "concurrency" and (found := await self._settled(identity)):
                    return (
                        found  # the quota is checked before the name: this pod may be what fills it
                    )
                raise

        pod = await self._make_by(ask, identity)
        kept = [one.get("restartPolicy") for one in pod["spec"].get("initContainers") or ()]
        asked = [one.get("restartPolicy") for one in wanted["spec"].get("initContainers") or ()]
        if asked and not set(asked) <= set(kept):
            await self.kill(identity)
            raise ConfigurationError(
                "this cluster has no native sidecars: use Kubernetes 1.29 or later"
            )
        return pod

    def _pod(self, spec: SandboxSpec, identity: str) -> Pod:
        wanted = spec.image or self.settings.kubernetes.image
        shown = {
            f"perdure.{name}": value
            for name, value in spec.labels.items()
            if pods.LABEL_VALUE.fullmatch(value) and re.fullmatch(r"[\w-]{1,50}", name, re.ASCII)
        }
        own: dict[str, Any] = {"workdir": spec.workdir, "labels": dict(spec.labels)}
        if spec.sidecars:
            own["sidecars"] = pod_sidecars.allowed_restarts(spec.sidecars)
        return pods.pod_of(
            spec,
            cluster=pods.cluster_fields(self.settings.kubernetes),
            name=self._name(identity),
            image=self._pulled(wanted),
            sidecar_images={
                name: self._pulled(self.image_used_for(one.image or ""))
                for name, one in spec.sidecars.items()
            },
            labels={**shown, pods.SCOPE: self._scope, pods.NETWORK: str(spec.network)},
            annotations={
                pods.IDENTITY: identity,
                pods.SPEC: json.dumps(own),
                pods.EXPIRES: str(time.time() + spec.ttl_s),
            },
        )

    def _pulled(self, image: str) -> str:
        return image_names.mirrored(image, self.settings.sandbox.image_mirror)

    def sidecars_refusal(self, sidecars: Mapping[str, Sidecar]) -> str:
        return pod_sidecars.refusal(sidecars)

    async def _up(self, pod: Pod, identity: str) -> Pod:
        """Wait until it runs. Raises: SandboxLost when it ended. A pod that cannot come up is deleted."""
        wait = BootWait(identity)
        pause = LOOK_S[0]
        while (now := pods.state_of(pod)).state == "coming":
            if (reason := wait.judged(pod)) is not None:
                with contextlib.suppress(PerdureError):  # if the API refuses, the reaper deletes it
                    await self.kill(identity)
                raise reason
            await asyncio.sleep(pause)
            pause = min(2 * pause, LOOK_S[1])
            found = await retry_transient(lambda: self.find(identity))
            if found is None or found["metadata"]["uid"] != pod["metadata"]["uid"]:
                raise sandbox_lost_error(self.name, identity, "(it was deleted)")
            pod = found
        if now.state != "up":
            if now.why.startswith(pods.NEVER_BEGAN) and names_missing_program(now.why):
                await self.kill(identity)
                raise missing_programs_error(identity, now.why)
            raise sandbox_lost_error(self.name, identity, f"({now.why})")
        return pod

    def _name(self, identity: str) -> str:
        """Unique in the namespace, which several deployments may share. It begins with a letter."""
        return f"perdure-{identity}-{hashlib.sha256(self._scope.encode()).hexdigest()[:8]}"

    # -- calls ------------------------------------------------------------------------------------

    async def find(self, identity: str) -> Pod | None:
        name = self._name(identity)
        try:
            return await self._call("get", lambda it: it.read(name))
        except Missing:
            return None

    async def renew(self, identity: str, name: str, ttl_s: float) -> None:
        """Update the annotation, so that `list` shows the deadline that the pod's first process enforces."""
        until = {pods.EXPIRES: str(time.time() + ttl_s)}
        try:
            await retry_transient(lambda: self._call("patch", lambda it: it.annotate(name, until)))
        except Missing as error:
            raise sandbox_lost_error(self.name, identity, error) from error

    async def run(
        self,
        what: str,
        name: str,
        argv: Sequence[str],
        given: Sequence[bytes | Path],
        seconds: float,
    ) -> kubernetes_client.CommandOutput:
        return await self._call(what, lambda it: it.run(name, argv, given, seconds))

    async def _call(self, what: str, call: Callable[[kubernetes_client.PodApi], Awaitable[T]]) -> T:
        try:
            done = await call(
                await kubernetes_client.pod_api(
                    self.settings.kubernetes.context, self.namespace, self.request_s
                )
            )
        except Exception as error:
            found = kubernetes_errors.typed(error, what, key_works=self._key_works)
            if self._key_works and getattr(error, "status", None) == 401:
                await self._renew_credentials(str(found))
            raise found from error
        self._key_works = True
        return done

    async def _renew_credentials(self, why: str) -> None:
        """Raises: ControlPlaneError when they cannot be read: they worked before, so try again."""
        try:
            await kubernetes_client.renew_credentials(self.settings.kubernetes.context)
        except ConfigurationError as error:
            raise ControlPlaneError(
                f"{why}; {error}", retry_after=kubernetes_errors.REFUSAL_PASSES_S
            ) from error

    def is_open(self, identity: str) -> ConfigurationError:
        return ConfigurationError(
            f"sandbox {identity!r} reaches the API server, so the network of namespace "
            f"{self.namespace!r} is open: apply the NetworkPolicy of {kubernetes_errors.ROLE}, in a cluster whose "
            "network plugin enforces it"
        )


def _of_image(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The image's variables: without those of Kubernetes, Perdure, a user or a shell."""
    ours = ("KUBERNETES_", "PERDURE_")
    shell = ("HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PWD", "SHLVL", "USER", "_")
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(ours) and name not in shell
    }


def _time(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
