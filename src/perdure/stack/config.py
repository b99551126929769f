"""Settings for commands: resolved once, every complaint names the variable and the fix."""

import difflib
import os
from typing import NamedTuple

from perdure import settings
from perdure.errors import ConfigurationError
from perdure.settings import PREFIX, Settings, toml_file

NOT_SETTINGS = {
    "PERDURE_CONFIG": "the TOML file to read",
    "PERDURE_DEBUG": "1 shows tracebacks",
    "PERDURE_SECRET": "what session keys derive from, where gateway and workers share no home",
    "PERDURE_BOX": "set inside sandboxes",
    "PERDURE_EXEC": "set inside sandboxes",
    "PERDURE_E2B_SCOPE": "names the deployment among sandboxes of one E2B account",
    "PERDURE_E2B_TEMPLATE": "the E2B template that trees are uploaded into, `base` by default",
    "PERDURE_DAYTONA_SCOPE": "names the deployment among sandboxes of one Daytona account",
    "PERDURE_DAYTONA_SNAPSHOT": "the Daytona snapshot that trees are uploaded into, the account's default by default",
    "PERDURE_DOCKER_SCOPE": "names the deployment among containers of one Docker engine",
    "PERDURE_DOCKER_IMAGE": "the image that trees are put into, `python:3.11-bookworm` by default",
    "PERDURE_DOCKER_NETWORK": "a network of the engine instead of none, for agents and grading too",
    "PERDURE_DOCKER_RUNTIME": "the engine's runtime, e.g. `runsc`; its default otherwise",
    "PERDURE_KUBERNETES_SCOPE": "names the deployment among pods of one namespace",
    "PERDURE_KUBERNETES_NAMESPACE": "where sandboxes are pods, `perdure-sandboxes` by default",
    "PERDURE_KUBERNETES_CONTEXT": "the context of KUBECONFIG, its current one by default",
    "PERDURE_KUBERNETES_IMAGE": "the image that trees are put into, `python:3.11-bookworm` by default",
    "PERDURE_KUBERNETES_POD": "a JSON file of pod fields for this cluster: tolerations, nodeSelector, imagePullSecrets, runtimeClassName and the like",
    "PERDURE_APPTAINER": "path of the apptainer program, where it is no system program",
    "PERDURE_IMAGE_MIRROR": "where images are pulled from: a prefix `mirror.example/hub/`, or `docker.io=mirror.example/hub,...`",
    "PERDURE_IMAGE_MAP": "a JSON file: image -> the template, snapshot or image built from it, for all or by provider",
    "PERDURE_SANDBOX_METADATA_FILE": "a JSON file of routing tags for E2B sandboxes (slime: SWE_SANDBOX_METADATA_FILE)",
    "PERDURE_SANDBOX_IMAGE_METADATA_KEY": "its key of the image (slime: SWE_SANDBOX_IMAGE_METADATA_KEY)",
    "PERDURE_CLAUDE_CODE_TARBALL": "its package, where no npm registry is (slime: SWE_HOST_CC_TARBALL)",
    "PERDURE_CODEX_TARBALL": "its package, where no npm registry is",
    "PERDURE_OPENCODE_TARBALL": "its package, where no npm registry is",
    "PERDURE_QWEN_CODE_TARBALL": "its package, where no npm registry is",
    "PERDURE_NODE_TARBALL": "Node for qwen_code, likewise (slime: SWE_HOST_NODE_TARBALL)",
    "PERDURE_OPENHANDS_PYTHON": "the Python of at least 3.12 that openhands runs on, where uv finds none",
}


class Origin(NamedTuple):
    """Where a value came from, in words: `default`, a variable's name, or the TOML file."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name


def load_settings() -> Settings:
    """As every process does, and what only a person's own command line may have wrong.

    Raises: ConfigurationError naming the variable or the TOML key, and the fix.
    """
    _refuse_unknown_variables()
    _refuse_missing_file()
    return settings.load_settings()


def origin(name: str, resolved: Settings) -> Origin:
    """Where the value of one field came from."""
    variable = PREFIX + name.upper()
    if variable in {key.upper() for key in os.environ}:
        return Origin("environment", variable)
    if name in resolved.model_fields_set:
        return Origin("file", toml_file().name)
    return Origin("default", "default")


def _refuse_unknown_variables() -> None:
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    for variable in os.environ:
        ours = variable.startswith(PREFIX) and not variable.startswith("PERDURE_TEST_")
        if ours and variable not in {*known, *NOT_SETTINGS}:
            close = difflib.get_close_matches(variable, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else "`perdure settings` lists them"
            raise ConfigurationError(f"{variable} is no setting: {hint} Otherwise unset it")


def _refuse_missing_file() -> None:
    """A file that somebody named by hand; the default one need not be there."""
    named = os.environ.get("PERDURE_CONFIG")
    if named and not toml_file().is_file():
        raise ConfigurationError(f"PERDURE_CONFIG={named!r}: there is no such file")
