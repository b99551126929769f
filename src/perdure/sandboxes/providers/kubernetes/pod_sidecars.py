"""The sidecars of a sandbox's pod.

Each is an init container. Kubernetes starts them one by one, in the order of their dependencies, and
then the sandbox's own container. One that `completes` is an ordinary init container. The others are
native sidecars (Kubernetes 1.29): the next container waits for their startup probe, which is the
health check. Kubernetes starts a native sidecar again when it ends, with an empty disk. The tests
would then see another database, so the sandbox counts as lost, unless the task itself asks for
restarts.
"""

import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from perdure.sandboxes.providers.kubernetes.kubernetes_client import CONTAINER
from perdure.sandboxes.sidecar_boot import CAPABILITIES, LONGEST_PAUSE_S, limits_of
from perdure.types import Healthcheck, Limits, SharedFolder, Sidecar
from perdure.types.containers import host_names, start_order

CONTAINER_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
USER = re.compile(r"(\d+)(?::(\d+))?")
BOOT_RESTARTS = 5
"""Restarts of a sidecar during the boot, if its restart policy allows any number."""
SHARED = "shared-"
"""Prefix of the names of volumes that containers share."""


def refusal(sidecars: Mapping[str, Sidecar]) -> str:
    """What to change before a pod can run these; empty if it can."""
    for name, sidecar in sidecars.items():
        if not CONTAINER_NAME.fullmatch(name) or name == CONTAINER:
            return (
                f"rename {name!r}: a container's name has lower-case letters, digits and '-', and is "
                f"not {CONTAINER!r}"
            )
        for alias in sidecar.aliases:
            if not HOST_NAME.fullmatch(alias):
                return f"rename {alias!r} of {name!r}: it must be a DNS name in lower case"
        if sidecar.user is not None and not USER.fullmatch(sidecar.user):
            return f"set `user` of {name!r} to a number instead of {sidecar.user!r}"
        for other, condition in sidecar.depends_on.items():
            if condition == "healthy" and sidecars[other].healthcheck is None:
                return (
                    f"{name!r} waits until {other!r} is healthy: give {other!r} a health check, "
                    "because Kubernetes does not run its image's"
                )
    return ""


def allowed_restarts(sidecars: Mapping[str, Sidecar]) -> dict[str, int | None]:
    """How often each may be restarted; None: any number of times."""
    return {name: _allowed_restarts(one) for name, one in sidecars.items()}


def _allowed_restarts(sidecar: Sidecar) -> int | None:
    policy, _, times = sidecar.restart.partition(":")
    if policy == "no" or sidecar.completes:
        return 0
    return int(times) if times else None


# -- the pod --------------------------------------------------------------------------------------


def pod_fields(
    sidecars: Mapping[str, Sidecar], images: Mapping[str, str], limits: Limits
) -> dict[str, Any]:
    """Fields of the pod. `images`: sidecar -> what its node pulls."""
    if not sidecars:
        return {}
    order = start_order(dict(sidecars))
    return {
        "initContainers": [
            _container(name, sidecars[name], images[name], limits_of(sidecars[name], limits))
            for name in order
        ],
        "hostAliases": [{"ip": "127.0.0.1", "hostnames": list(host_names(sidecars))}],
    }


def _container(name: str, sidecar: Sidecar, image: str, limits: Limits) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": name,
        "image": image,
        "env": [{"name": key, "value": _literal(value)} for key, value in sidecar.env.items()],
        "resources": resources_of(limits),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
            **_user(sidecar.user),
        },
        "volumeMounts": folder_mounts(sidecar.folders),
    }
    if sidecar.entrypoint is not None:
        made["command"] = [_literal(word) for word in sidecar.entrypoint]
    if sidecar.command is not None:
        made["args"] = [_literal(word) for word in sidecar.command]
    if sidecar.workdir:
        made["workingDir"] = sidecar.workdir
    if not sidecar.completes:
        made["restartPolicy"] = "Always"
        if sidecar.healthcheck is not None:
            made["startupProbe"] = _probe(sidecar.healthcheck)
    return made


def _probe(check: Healthcheck) -> dict[str, Any]:
    """It fails after the time after which Docker reports a container as unhealthy."""
    period = max(1, int(min(LONGEST_PAUSE_S, check.interval_s)))
    return {
        "exec": {"command": [_literal(word) for word in check.command]},
        "periodSeconds": period,
        "timeoutSeconds": math.ceil(check.timeout_s),
        "failureThreshold": math.ceil(check.limit_s / period),
    }


def _literal(text: str) -> str:
    """Kubernetes replaces `$(NAME)` in commands and variables."""
    return text.replace("$", "$$")


def _user(user: str | None) -> dict[str, int]:
    found = USER.fullmatch(user or "")
    if found is None:
        return {}
    group = {"runAsGroup": int(found[2])} if found[2] else {}
    return {"runAsUser": int(found[1]), **group}


def resources_of(limits: Limits) -> dict[str, Any]:
    amounts = {
        "cpu": f"{limits.cpus:g}",
        "memory": f"{limits.memory_mb}Mi",
        "ephemeral-storage": f"{limits.disk_mb}Mi",
    }
    return {"requests": amounts, "limits": amounts}


def folder_mounts(folders: Iterable[SharedFolder]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"{SHARED}{one.name}",
            "mountPath": one.target,
            **({"readOnly": True} if one.read_only else {}),
        }
        for one in folders
    ]


def folder_volumes(folders: Iterable[SharedFolder], limits: Limits) -> list[dict[str, Any]]:
    names = dict.fromkeys(one.name for one in folders)
    size = {"sizeLimit": f"{limits.disk_mb}Mi"}
    return [{"name": f"{SHARED}{name}", "emptyDir": size} for name in names]


# -- its state ------------------------------------------------------------------------------------


class Failure(NamedTuple):
    sidecar: str
    what: str
    restarted: bool
    """Kubernetes has started it again since, so its log has begun again too."""


def failure(pod: Mapping[str, Any], allowed: Mapping[str, int | None]) -> Failure | None:
    """The first sidecar that ended although it should not. `allowed`: as `allowed_restarts`."""
    status = pod.get("status") or {}
    is_booting = status.get("phase") == "Pending"
    for one in status.get("initContainerStatuses") or ():
        name, state = str(one.get("name")), one.get("state") or {}
        ended = state.get("terminated") or (one.get("lastState") or {}).get("terminated")
        if name not in allowed or not ended:  # a cluster may add others, such as a service mesh's
            continue
        declared = next(it for it in pod["spec"]["initContainers"] if it["name"] == name)
        if "restartPolicy" not in declared and ended.get("exitCode") == 0:
            continue  # it has done its one job
        most = allowed[name]
        if most is None:
            most = BOOT_RESTARTS if is_booting else sys.maxsize
        restarts = int(one.get("restartCount", 0))
        if restarts + ("terminated" in state) > most:
            what = f"exited with code {ended.get('exitCode')} ({ended.get('reason', '')})"
            if is_booting and "startupProbe" in declared:
                what += ", or was ended because it was not healthy in time"
            return Failure(name, what, restarts > 0)
    return None
