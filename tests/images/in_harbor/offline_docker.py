"""Runs inside Harbor's own Python: its docker environment, without an image that no host here can pull."""

# mypy: ignore-errors
# Harbor is importable only in its own environment.

import os

from harbor.environments.docker.docker import DockerEnvironment


class OfflineDocker(DockerEnvironment):
    """The image of the egress sidecar is a stand-in. It enforces nothing, but the engine of the tests
    has no way out in any mode."""

    @classmethod
    def _egress_control_kernel_support(cls) -> bool:
        return True

    async def _ensure_egress_control_sidecar_image_built(self) -> None:
        self._env_vars.egress_control_sidecar_image_name = os.environ["EGRESS_SIDECAR"]
