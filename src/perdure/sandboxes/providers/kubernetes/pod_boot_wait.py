"""How long a pod may take to boot. The limit depends on what the pod waits for."""

import time

from perdure.errors import (
    ConfigurationError,
    ControlPlaneError,
    InstanceError,
    PerdureError,
    RateLimited,
)
from perdure.sandboxes.guest.container_options import missing_programs_error, names_missing_program
from perdure.sandboxes.guest.service_retries import sandbox_lost_error
from perdure.sandboxes.image_pulls import Puller, refused
from perdure.sandboxes.providers.kubernetes import kubernetes_errors, pods
from perdure.sandboxes.providers.kubernetes.pods import Pod

BOOT_S = 1500.0
"""Seconds for the whole boot. Below the boot activity's time limit; a large image takes long."""
ROOM_S = 300.0
"""Seconds that the cluster may take to find or add a node."""
LARGER_S = 900.0
"""Seconds that it may take to add a larger node, if none is large enough."""
PULL_S = 120.0
"""Seconds to wait while pulls fail for a reason that may be transient."""
STUCK_S = 30.0
"""Seconds to wait while the node reports a transient container error."""
PULLER = Puller(
    log_in=f"name a secret for {{registry}} in imagePullSecrets of {pods.POD_VARIABLE}",
    storage="the node's images",
)


class BootWait:
    """Limits how long a pod may boot, by what it waits for."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self._began = self._since = time.monotonic()
        self._kind = ""
        self._cause = ""

    def judged(self, pod: Pod) -> PerdureError | None:
        """The error if the pod should be given up, otherwise None."""
        found = pods.obstacle(pod)
        kind = found.kind if found is not None else ""
        if kind != self._kind:
            self._kind, self._since = kind, time.monotonic()
        lasts = time.monotonic() - self._since
        if found is None:
            if time.monotonic() - self._began < BOOT_S:
                return None
            return sandbox_lost_error(
                "kubernetes", self.identity, f"(it did not start in {BOOT_S:g} s)"
            )
        said = f"{found.reason}: {found.message}"
        match found.kind:
            case "image":
                return self._judged_image(found, lasts)
            case "container":
                if names_missing_program(said):
                    return missing_programs_error(self.identity, said)
                return (
                    sandbox_lost_error("kubernetes", self.identity, f"({said})")
                    if lasts > STUCK_S
                    else None
                )
        return self._no_node(found, lasts)

    def _judged_image(self, found: pods.Obstacle, lasts: float) -> PerdureError | None:
        """Keeps the last failure: during the back-off between two pulls the pod does not show it."""
        if found.reason != "ImagePullBackOff" or not self._cause:
            self._cause = f"{found.reason}: {found.message}"
        if found.reason in ("InvalidImageName", "ErrImageNeverPull"):
            return InstanceError(f"image {found.image!r} cannot be pulled: {self._cause}")
        reason = refused(found.image, self._cause, PULLER)
        passes = isinstance(reason, ControlPlaneError) and lasts <= PULL_S
        return None if passes else reason

    def _no_node(self, found: pods.Obstacle, lasts: float) -> PerdureError | None:
        if lasts <= (LARGER_S if pods.fits_nowhere(found) else ROOM_S):
            return None
        said = f"no node accepts sandbox {self.identity!r}: {found.message}"
        if pods.fits_nowhere(found):
            return ConfigurationError(
                f"{said}; even an empty node is too small for it: lower limits.memory_mb, "
                "limits.cpus or limits.disk_mb, or add larger nodes"
            )
        if pods.lacks_room(found):
            return RateLimited(said, limit="concurrency", retry_after=kubernetes_errors.RELEASE_S)
        return ConfigurationError(f"{said}; correct {pods.POD_VARIABLE}, or the nodes' taints")
