"""A Kubernetes that runs here: its API for pods to unmodified clients, bubblewrap boxes behind it.

    python -m tests.doubles.kubernetes_server --state DIR --port 3988
    export KUBECONFIG=DIR/kubeconfig

Kill it and start it again on the same DIR: it keeps its state, and its pods live on. Post faults
to `/__control/rules` (see `fault_rules.Rule`). Init containers run as `kubernetes_sidecars` says. Not
played: images, logs of other containers, port forwarding, SPDY, network policies, and objects other
than pods.
"""

import asyncio
import contextlib
import errno
import json
import os
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from aiohttp import WSMsgType, web

from perdure.errors import NotFound, SandboxLost
from perdure.sandboxes.base import Exec, ExecState, ExecStatus, Mount, Network, SandboxSpec
from perdure.sandboxes.host.namespaces import NamespaceSandbox
from perdure.sandboxes.host.sandbox_folder import SandboxFolder
from perdure.settings.settings_tree import Settings
from perdure.types import Limits
from tests.doubles.fault_rules import Faults, Rule, met_rule
from tests.doubles.kubernetes_sidecars import (
    NETWORK_OF,
    InitContainers,
    argv_of,
    invalid_field,
    status_of,
    variables,
)
from tests.doubles.service_double import LIMITS, Double, Guests, Refusal, abort, iso, pid_of, run

NAMESPACE = "/api/v1/namespaces/{ns}"
PODS = f"{NAMESPACE}/pods"
POD = f"{PODS}/{{name}}"
PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
MAIN = "main"
"""The exec id of a container's own command in its box."""
PIECE = 32 << 10
LONGEST_NAP_S = 0.1
STDIN, STDOUT, STDERR, STATUS, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
UNITS = {"": 1, "k": 1000, "M": 10**6, "G": 10**9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
WAITING = {
    "ErrImagePull": "failed to pull and unpack image: not found",
    "ImagePullBackOff": "Back-off pulling image",
    "InvalidImageName": "couldn't parse image name: invalid reference format",
    "CreateContainerError": "container runtime is busy",
}
FAILED = {
    "Evicted": "The node was low on resource: memory.",
    "NodeLost": "Node that was running the pod is unresponsive",
    "Preempting": "Preempted in order to admit critical pod",
    "OutOfcpu": "Node didn't have enough resource: cpu",
}
NO_NODE = "0/3 nodes are available: 3 Insufficient memory."


class Containers(Guests):
    """Boxes whose processes may write below their own `/proc`, as in a container: the guest sets the
    oom score of commands. The host's files there stay read-only."""

    def command(self, spec: SandboxSpec, box: SandboxFolder) -> list[str]:
        argv = super().command(spec, box)
        at = argv.index("--chdir")  # the launcher takes what has a read-only /dev for sealed
        argv = [*argv[:at], "--remount-ro", "/dev", *argv[at:]]
        if (pid := spec.labels.get(NETWORK_OF)) is None:
            return argv
        argv.remove("--unshare-net")
        return ["/usr/bin/nsenter", f"--net=/proc/{pid}/ns/net", "--", *argv]


class KubernetesServer(Double):
    """One API server, its scheduler and its one node."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.guests = Containers(Settings(home=state / "guests"))
        self.faults = Faults(state / "rules.json", self._about, _caller)
        self.settings = {
            "max_pods": None, "boot_s": 0.0, "delete_s": 0.0, "list_lag_s": 0.0,
            "clock_offset_s": 0.0, "open_network": 0.0, "minor_version": 33.0,
        }  # fmt: skip
        self._working: dict[str, asyncio.Task[None]] = {}
        self._place = ("127.0.0.1", 0)

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return [
            web.get("/version", self._version),
            web.get("/api", self._versions),
            web.get("/apis", self._groups),
            web.get("/api/v1", self._resources),
            web.get("/{probe:healthz|livez|readyz}", self._probe),
            web.get("/api/v1/pods", self._list),
            web.get(PODS, self._list),
            web.post(PODS, self._create),
            web.get(POD, self._get),
            web.patch(POD, self._patch),
            web.delete(POD, self._delete),
            web.get(f"{POD}/exec", self._exec),
            web.post(f"{POD}/exec", self._exec),
            web.get(f"{POD}/log", self._log),
            web.route("*", "/{rest:.*}", self._unknown),
        ]

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig for this server, written at each start."""
        return self.state / "kubeconfig"

    @classmethod
    @contextlib.asynccontextmanager
    async def serving(cls, state: Path, port: int = 0) -> AsyncIterator[tuple[Self, str]]:
        async with super().serving(state, port) as (server, url):
            server._place = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
            server.kubeconfig.write_text(json.dumps(_kubeconfig(url)))
            yield server, url

    async def _about(self, request: web.Request) -> str:
        if request.method == "POST" and request.path.endswith("/pods"):
            return json.dumps((await request.json())["metadata"])
        record = self._find(request)
        return "" if record is None else json.dumps(record["pod"]["metadata"])

    # -- what every client asks first -------------------------------------------------------------

    async def _version(self, request: web.Request) -> web.StreamResponse:
        version = {"major": "1", "minor": "33", "gitVersion": "v1.33.0-perdure"}
        return web.json_response({**version, "platform": "linux/amd64"})

    async def _versions(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"kind": "APIVersions", "versions": ["v1"]})

    async def _groups(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})

    async def _resources(self, request: web.Request) -> web.StreamResponse:
        pods = {
            "name": "pods",
            "singularName": "pod",
            "namespaced": True,
            "kind": "Pod",
            "shortNames": ["po"],
            "verbs": ["create", "delete", "get", "list", "patch", "watch"],
        }
        commands = {"name": "pods/exec", "singularName": "", "namespaced": True}
        commands |= {"kind": "PodExecOptions", "verbs": ["create", "get"]}
        answer = {"kind": "APIResourceList", "groupVersion": "v1", "resources": [pods, commands]}
        return web.json_response(answer)

    async def _probe(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    async def _unknown(self, request: web.Request) -> web.StreamResponse:
        raise _refusal(404, "NotFound", "the server could not find the requested resource")

    # -- pods -------------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.StreamResponse:
        pod, namespace = await request.json(), request.match_info["ns"]
        name = pod["metadata"].get("name", "")
        if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name):
            raise _refusal(422, "Invalid", f'Pod "{name}" is invalid: metadata.name')
        if field := invalid_field(pod["spec"]):
            raise _refusal(422, "Invalid", f'Pod "{name}" is invalid: {field}')
        if (self.settings["minor_version"] or 0) < 28:  # it drops fields that it does not know
            for one in pod["spec"].get("initContainers") or ():
                one.pop("restartPolicy", None)
        self._check_quota(namespace, name)  # admission comes before the name is checked
        if self.sandboxes.read(_key(namespace, name)) is not None:
            raise _refusal(409, "AlreadyExists", f'pods "{name}" already exists')
        now, rule = time.time(), met_rule.get()
        uid = str(uuid4())
        pod["metadata"] |= {"namespace": namespace, "uid": uid, "creationTimestamp": _stamp(now)}
        pod |= {"apiVersion": "v1", "kind": "Pod", "status": {"phase": "Pending"}}
        if first := pod["spec"].get("initContainers"):
            pod["status"]["initContainerStatuses"] = [status_of(one) for one in first]
        record = {
            "id": uid,
            "key": _key(namespace, name),
            "created": now,
            "pod": pod,
            "stuck": _stuck(rule, now),
            "silent": False,
        }
        self._save(record)
        self._boot_later(record["key"])
        return web.json_response(self._shown(record), status=201)

    def _check_quota(self, namespace: str, name: str) -> None:
        most, used = self.settings["max_pods"], len(self.sandboxes.all())
        if most is not None and used >= most:
            raise _refusal(
                403,
                "Forbidden",
                f'pods "{name}" is forbidden: exceeded quota: pods, requested: pods=1, '
                f"used: pods={used}, limited: pods={most:.0f}",
            )

    def _boot_later(self, key: str) -> None:
        self._working[key] = asyncio.create_task(self._boot(key))
        self._working[key].add_done_callback(lambda _: self._working.pop(key, None))

    async def _boot(self, key: str) -> None:
        """What scheduler, kubelet and runtime do until the container's command runs."""
        record = self.sandboxes.read(key)
        if record is None:
            return
        if record["stuck"]:
            self._status(key, **_stuck_status(record["stuck"]["state"], record["stuck"]["why"]))
            if record["stuck"]["state"] in FAILED:
                return
            while record["stuck"]["until"] is None or time.time() < record["stuck"]["until"]:
                if self.sandboxes.read(key) is None:
                    return
                await asyncio.sleep(0.02)
        await asyncio.sleep(self.settings["boot_s"] or 0)
        is_up = await self._start(record)
        started = {"startedAt": _stamp(time.time())}
        if not self._is_current(record):
            await self._kill(record)  # deleted meanwhile
        elif is_up:
            self._status(key, phase="Running", state={"running": started})
        else:
            await self._fall(key, "Failed")

    async def _start(self, record: Mapping[str, Any]) -> bool:
        """False if an init container failed."""
        spec, first = record["pod"]["spec"], self._first(record)
        (container,) = spec["containers"]
        mounts = first.mounts(spec, container)
        box = await self.guests.create(self._box(spec, container, mounts), record["id"])
        assert isinstance(box, NamespaceSandbox)
        if not await first.start(spec, box):
            return False
        folders = [mount["mountPath"] for mount in container.get("volumeMounts") or ()]
        await box.exec(["mkdir", "-p", "/", *folders])
        await box.start(MAIN, Exec(argv_of(container), cwd=container.get("workingDir") or "/"))
        return True

    def _first(self, record: Mapping[str, Any]) -> InitContainers:
        def note(name: str, fields: dict[str, Any]) -> None:
            now = self.sandboxes.read(record["key"])
            if now is not None and now["id"] == record["id"]:
                for one in now["pod"]["status"]["initContainerStatuses"]:
                    if one["name"] == name:
                        one.update(fields)
                self._save(now)

        folder = self.state / "pods" / record["id"]
        return InitContainers(self.guests, folder, record["id"], note)

    async def _kill(self, record: Mapping[str, Any]) -> None:
        """End its containers, and the boot that may be making more of them."""
        booting = self._working.get(record["key"])
        if booting is not None and booting is not asyncio.current_task():
            if self._is_current(record):
                booting.cancel()
            await asyncio.gather(booting, return_exceptions=True)
        await self.guests.kill(record["id"])
        if record["pod"]["spec"].get("initContainers"):
            await self._first(record).remove()

    def _box(
        self, spec: Mapping[str, Any], container: Mapping[str, Any], mounts: tuple[Mount, ...]
    ) -> SandboxSpec:
        host, port = self._place if self.settings["open_network"] else ("10.96.0.1", 443)
        env = variables(container) | {
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": str(port),
        }
        bounds = (container.get("resources") or {}).get("limits") or {}
        return SandboxSpec(
            workdir="/home/agent",
            env=env,
            mounts=mounts,
            limits=_limits(bounds),
            network=Network.HOST if self.settings["open_network"] else Network.NONE,
            ttl_s=spec.get("activeDeadlineSeconds") or 30 * 86400,
        )

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._shown(self._known(request)))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if _is_true(request.query.get("watch", "")):
            return await self._watch(request)
        found = self._selected(request)
        start, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", 500))
        following = str(start + limit) if start + limit < len(found) else None
        more = {} if following is None else {"continue": following}
        items = [self._shown(record) for record in found[start : start + limit]]
        meta = {"resourceVersion": _version_now(), **more}
        answer = {"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": items}
        return web.json_response(answer)

    def _selected(self, request: web.Request) -> list[dict[str, Any]]:
        newest = time.time() - (self.settings["list_lag_s"] or 0)
        namespace = request.match_info.get("ns")
        found = [
            record
            for record in self.sandboxes.all()
            if record["created"] <= newest
            and namespace in (None, record["pod"]["metadata"]["namespace"])
            and _selects(request.query.get("labelSelector", ""), _labels(record))
            and _selects(request.query.get("fieldSelector", ""), _fields(record))
        ]
        return sorted(found, key=lambda record: record["key"])

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        """Each pod, then each change, for as long as the caller asked."""
        seconds = float(request.query.get("timeoutSeconds", 300))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        seen: dict[str, dict[str, Any]] = {}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            now = {record["id"]: self._shown(record) for record in self._selected(request)}
            gone = [("DELETED", pod) for uid, pod in seen.items() if uid not in now]
            new = [
                ("MODIFIED" if uid in seen else "ADDED", pod)
                for uid, pod in now.items()
                if seen.get(uid) != pod
            ]
            for kind, pod in [*gone, *new]:
                await response.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")
            seen = now
            await asyncio.sleep(0.05)
        return response

    async def _patch(self, request: web.Request) -> web.StreamResponse:
        if "json-patch" in request.content_type:
            raise _refusal(415, "UnsupportedMediaType", "only merge patches are played")
        change = await request.json()
        record = self._known(request)  # read after the wait: other requests write it too
        before = record["pod"]["spec"].get("activeDeadlineSeconds")
        merged = _merged(record["pod"], change)
        after = merged["spec"].get("activeDeadlineSeconds")
        if before is not None and (after is None or after > before):
            raise _refusal(422, "Invalid", "spec.activeDeadlineSeconds: must be less than before")
        record["pod"] = merged
        self._save(record)
        return web.json_response(self._shown(record))

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        options = await request.json() if request.body_exists else {}
        record = self._known(request)
        grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
        record["pod"]["metadata"]["deletionTimestamp"] = _stamp(time.time())
        self._save(record)
        if grace is not None and int(grace) == 0:
            await self._end(record)
            return web.json_response(self._shown(record))
        if not record["silent"]:
            await self._kill(record)
            if self.settings["delete_s"]:
                self._working[f"end {record['id']}"] = asyncio.create_task(self._end_later(record))
            else:
                await self._end(record)
        return web.json_response(self._shown(record))

    async def _end_later(self, record: Mapping[str, Any]) -> None:
        await asyncio.sleep(self.settings["delete_s"] or 0)
        await self._end(record)

    async def _end(self, record: Mapping[str, Any]) -> None:
        """Remove the pod. If this is interrupted, the pod is still known and the next call removes it."""
        await self._kill(record)
        if self._is_current(record):
            self.sandboxes.remove(record["key"])

    def _is_current(self, record: Mapping[str, Any]) -> bool:
        """Whether it is still the pod of its name: a later one may have taken the name."""
        now = self.sandboxes.read(record["key"])
        return now is not None and now["id"] == record["id"]

    async def expire(self) -> None:
        """Note containers whose command has ended, and go on making the pods that were being made."""
        for record in self.sandboxes.all():
            status = record["pod"]["status"]
            is_going = "deletionTimestamp" in record["pod"]["metadata"]
            if status["phase"] == "Pending" and record["key"] not in self._working:
                if not is_going:
                    self._boot_later(record["key"])  # an earlier server was killed as it booted
            elif status["phase"] == "Running" and not record["silent"]:
                await self._look_after(record)

    async def _look_after(self, record: dict[str, Any]) -> None:
        if not self._is_current(record):
            return
        box = await self.guests.found(record["id"])
        ended: ExecStatus | None = None
        with contextlib.suppress(NotFound, SandboxLost):
            ended = ExecStatus(ExecState.LOST) if box is None else await box.poll(MAIN)
        if ended is not None and not ended.done:
            spec, status = record["pod"]["spec"], record["pod"]["status"]
            is_going = "deletionTimestamp" in record["pod"]["metadata"]
            if box is not None and spec.get("initContainers") and not is_going:
                statuses = status["initContainerStatuses"]
                await self._first(record).look_after(spec, statuses, box)
            return
        code = ended.code if ended is not None and ended.code is not None else 137
        ended_as = {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}
        phase = "Succeeded" if code == 0 else "Failed"
        await self._fall(record["key"], phase, state={"terminated": ended_as})

    async def _fall(self, key: str, phase: str, **fields: Any) -> None:
        """End its processes. Its object stays until it is deleted."""
        record = self._status(key, phase=phase, **fields)
        if record is not None:
            await self.guests.kill(record["id"])  # the logs of the other containers stay

    async def _break(self, record: dict[str, Any], how: str) -> None:
        """Remove a running pod as a cluster may: eviction, memory, preemption, a lost node."""
        if how == "OOMKilled":
            ended = {"exitCode": 137, "reason": "OOMKilled"}
            await self._fall(record["key"], "Failed", state={"terminated": ended})
        elif how == "Preempted":
            why = "Preempted by a pod on node n1"
            condition = _condition("DisruptionTarget", "True", "PreemptionByScheduler", why)
            record["pod"]["metadata"]["deletionTimestamp"] = _stamp(time.time())
            self._save(record)
            await self._fall(record["key"], "Running", conditions=[condition])
        elif how == "NodeLost":
            record["silent"] = True  # its processes run on
            self._save(record)
        else:
            fields = {"reason": how, "message": FAILED.get(how, "")}
            await self._fall(record["key"], "Failed", **fields)

    def _save(self, record: dict[str, Any]) -> None:
        record["pod"]["metadata"]["resourceVersion"] = _version_now()
        self.sandboxes.write(record["key"], record)

    def _status(self, key: str, **fields: Any) -> dict[str, Any] | None:
        """Set the status. The record; None if it was deleted."""
        record: dict[str, Any] | None = self.sandboxes.read(key)
        if record is None:
            return None
        if state := fields.pop("state", None):
            (container,) = record["pod"]["spec"]["containers"]
            said = {"name": container["name"], "image": container.get("image", "")}
            ready = {"ready": "running" in state, "restartCount": 0, "imageID": ""}
            fields["containerStatuses"] = [{**said, **ready, "state": state}]
        record["pod"]["status"].update(fields)
        self._save(record)
        return record

    def _find(self, request: web.Request) -> dict[str, Any] | None:
        place = request.match_info.get("ns"), request.match_info.get("name")
        found: dict[str, Any] | None = None
        if place[0] and place[1]:
            found = self.sandboxes.read(_key(place[0], place[1]))
        return found

    def _known(self, request: web.Request) -> dict[str, Any]:
        record = self._find(request)
        if record is None:
            name = request.match_info["name"]
            raise _refusal(404, "NotFound", f'pods "{name}" not found')
        return record

    def _shown(self, record: Mapping[str, Any]) -> dict[str, Any]:
        pod: dict[str, Any] = json.loads(json.dumps(record["pod"]))
        offset = self.settings["clock_offset_s"] or 0
        pod["metadata"]["creationTimestamp"] = _stamp(record["created"] + offset)
        return pod

    # -- commands ---------------------------------------------------------------------------------

    async def _log(self, request: web.Request) -> web.StreamResponse:
        record, name = self._known(request), request.query.get("container", "")
        statuses = record["pod"]["status"].get("initContainerStatuses") or ()
        counts = {one["name"]: one["restartCount"] for one in statuses}
        restarts = counts.get(name, -1) - _is_true(request.query.get("previous", ""))
        try:
            text = await self._first(record).log(name, restarts)
        except (NotFound, SandboxLost):
            raise _refusal(400, "BadRequest", f"container {name} is not valid") from None
        lines = text.decode("utf-8", "replace").splitlines(keepends=True)
        return web.Response(text="".join(lines[-int(request.query.get("tailLines", 500)) :]))

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        record, rule = self._known(request), met_rule.get()
        if rule is not None and rule.kill and rule.when == "before":
            await self._break(record, rule.state or "Evicted")
            record = self._known(request)
        box = await self._box_of(record)
        if request.headers.get("Upgrade", "").lower() != "websocket":
            raise _refusal(400, "BadRequest", "Upgrade request required")
        socket = web.WebSocketResponse(protocols=PROTOCOLS, max_msg_size=0)
        await socket.prepare(request)
        if rule is not None and rule.stream == "cut":
            return abort(request)
        if rule is not None and rule.stream == "silent":
            await asyncio.Event().wait()
        try:
            await self._serve(request, socket, record, box)
        except (OSError, NotFound, SandboxLost):  # its pod went away meanwhile, or its client
            return abort(request)
        return socket

    async def _box_of(self, record: Mapping[str, Any]) -> NamespaceSandbox:
        phase = record["pod"]["status"]["phase"]
        if phase in ("Succeeded", "Failed"):
            message = f"cannot exec into a container in a completed pod; current phase is {phase}"
            raise _refusal(400, "BadRequest", message)
        if record["silent"]:
            message = "error dialing backend: dial tcp 10.0.0.7:10250: i/o timeout"
            raise _refusal(500, "InternalError", message)
        box = await self.guests.found(record["id"]) if phase == "Running" else None
        if box is None:
            message = 'unable to upgrade connection: container not found ("sandbox")'
            raise _refusal(500, "InternalError", message)
        return box

    async def _serve(
        self,
        request: web.Request,
        socket: web.WebSocketResponse,
        record: dict[str, Any],
        box: NamespaceSandbox,
    ) -> None:
        rule = met_rule.get()
        exec_id = f"e{uuid4().hex}"
        argv = request.query.getall("command", [])
        wants_input = _is_true(request.query.get("stdin", ""))
        for channel in (STDOUT, STDERR, STATUS):
            await socket.send_bytes(bytes([channel]))  # as real ones begin
        if wants_input:
            argv = await self._with_input(box, exec_id, argv)
        await box.start(exec_id, Exec(argv, cwd="/"))
        hearing = asyncio.create_task(_hear(socket, box, exec_id, wants_input))
        try:
            if rule is not None and (rule.when == "after" or rule.twice):
                await box.wait(exec_id)
            if rule is not None and rule.when == "after":
                if rule.kill:
                    await self._break(record, rule.state or "Evicted")
                if request.transport is not None:
                    request.transport.abort()
                return
            status = await self._copy(socket, box, exec_id, rule)
            if status.cause != "sandbox" and (rule is None or rule.stream != "no_end"):
                await socket.send_bytes(bytes([STATUS]) + json.dumps(_outcome(status)).encode())
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
        await socket.close()

    async def _copy(
        self,
        socket: web.WebSocketResponse,
        box: NamespaceSandbox,
        exec_id: str,
        rule: Rule | None,
    ) -> ExecStatus:
        """Send all that it writes, until it ends."""
        at, nap = {"stdout": 0, "stderr": 0}, 0.01
        half = rule is not None and rule.stream == "truncated"
        while not socket.closed:
            try:
                status = await box.wait(exec_id, nap)
                for channel, stream in ((STDOUT, "stdout"), (STDERR, "stderr")):
                    name: Any = stream
                    while data := await box.output(exec_id, name, at[stream], PIECE):
                        at[stream] += len(data)
                        data = data[: len(data) // 2] if half else data
                        await socket.send_bytes(bytes([channel]) + data)
            except (SandboxLost, NotFound, FileNotFoundError):
                break
            if status.done:
                return status
            nap = min(nap * 1.5, LONGEST_NAP_S)
        return ExecStatus(ExecState.KILLED, cause="sandbox")

    async def _with_input(
        self, box: NamespaceSandbox, exec_id: str, argv: Sequence[str]
    ) -> list[str]:
        fifo = f"/tmp/.{exec_id}"
        os.mkfifo(f"/proc/{pid_of(box, MAIN)}/root{fifo}")
        return ["bash", "-c", f'exec "$@" <{fifo}', "exec", *argv]


async def _hear(
    socket: web.WebSocketResponse, box: NamespaceSandbox, exec_id: str, wants_input: bool
) -> None:
    """Pass what the client sends to the command's standard input, until one of them ends."""
    if not wants_input:
        return
    fd = await _input_of(box, exec_id)
    if fd is None:
        return
    try:
        async for message in socket:
            if message.type is not WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel == CLOSE:
                return
            while channel == STDIN and data:
                try:
                    data = data[os.write(fd, data) :]
                except BlockingIOError:
                    await asyncio.sleep(0.005)
                except BrokenPipeError:
                    return  # the command has closed its standard input
    finally:
        os.close(fd)


async def _input_of(box: NamespaceSandbox, exec_id: str) -> int | None:
    """Wait until the command has opened its end: what is written before that is lost."""
    path = f"/proc/{pid_of(box, MAIN)}/root/tmp/.{exec_id}"
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return None  # its pod has gone away
        await asyncio.sleep(0.005)


# -- how things look on the wire ------------------------------------------------------------------


def _refusal(status: int, reason: str, message: str) -> Refusal:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return Refusal(status, {**body, "message": message, "reason": reason, "code": status})


def _caller(request: web.Request) -> tuple[str, str]:
    return request.headers.get("Authorization", ""), request.match_info.get("name", "")


def _key(namespace: str, name: str) -> str:
    return f"{namespace}.{name}"


def _kubeconfig(url: str) -> dict[str, Any]:
    """As JSON, which is valid YAML."""
    name = "perdure"
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "clusters": [{"name": name, "cluster": {"server": url}}],
        "users": [{"name": name, "user": {}}],
    }


def _limits(bounds: Mapping[str, str]) -> Limits:
    megabytes = {
        field: max(64, int(_bytes(bounds[name]) >> 20))
        for name, field in (("memory", "memory_mb"), ("ephemeral-storage", "disk_mb"))
        if name in bounds
    }
    cpus = {"cpus": _cpus(bounds["cpu"])} if "cpu" in bounds else {}
    return LIMITS.model_copy(update={**megabytes, **cpus})


def _bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"([\d.]+)([A-Za-z]*)", quantity).groups()  # type: ignore[union-attr]
    return int(float(number) * UNITS[unit])


def _cpus(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def _stuck(rule: Rule | None, now: float) -> dict[str, Any] | None:
    if rule is None or not rule.state or rule.kill:
        return None
    until = None if rule.state_s is None else now + rule.state_s
    return {"state": rule.state, "until": until, "why": rule.body or ""}


def _stuck_status(state: str, why: str) -> dict[str, Any]:
    if state in FAILED:
        return {"phase": "Failed", "reason": state, "message": why or FAILED[state]}
    if state == "Unschedulable":
        scheduled = _condition("PodScheduled", "False", state, why or NO_NODE)
        return {"conditions": [scheduled]}
    return {"state": {"waiting": {"reason": state, "message": why or WAITING.get(state, "")}}}


def _condition(kind: str, status: str, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def _is_true(text: str) -> bool:
    """Parsed as Go does, because clients differ."""
    return text in ("1", "t", "T", "true", "True", "TRUE")


def _selects(selector: str, values: Mapping[str, str]) -> bool:
    """Comma-separated `name`, `name=value`, `name==value` and `name!=value`."""
    for part in filter(None, selector.split(",")):
        found = re.fullmatch(r"\s*([^=!\s]+)\s*(!?=?=?)\s*(.*?)\s*", part)
        if found is None:
            return False
        name, sign, value = found.groups()
        if sign == "" and name not in values:
            return False
        if sign and (values.get(name) == value) is (sign == "!="):
            return False
    return True


def _labels(record: Mapping[str, Any]) -> Mapping[str, str]:
    return record["pod"]["metadata"].get("labels") or {}


def _fields(record: Mapping[str, Any]) -> Mapping[str, str]:
    meta = record["pod"]["metadata"]
    return {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "status.phase": record["pod"]["status"]["phase"],
    }


def _merged(value: Any, change: Any) -> Any:
    """RFC 7386."""
    if not isinstance(change, dict):
        return change
    kept = dict(value) if isinstance(value, dict) else {}
    for name, part in change.items():
        if part is None:
            kept.pop(name, None)
        else:
            kept[name] = _merged(kept.get(name), part)
    return kept


def _outcome(status: ExecStatus) -> dict[str, Any]:
    code = status.code if status.code is not None else 128 + (status.signal or 9)
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def _stamp(seconds: float) -> str:
    """Whole seconds, as the API gives them."""
    return f"{iso(seconds)[:19]}Z"


def _version_now() -> str:
    return str(time.time_ns())


serving = KubernetesServer.serving


def main() -> None:
    run(KubernetesServer, lambda url: f"{url}: KUBECONFIG is kubeconfig in DIR", 3988, __doc__)


if __name__ == "__main__":
    main()
