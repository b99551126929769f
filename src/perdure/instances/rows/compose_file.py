"""Reads the docker-compose.yaml of a Harbor task: the service `main` is the sandbox's own container,
and the others become its sidecars.

Each unsupported key becomes a problem that names it. An import reports all problems at once.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from perdure.instances.rows.compose_volumes import CONTEXT, ComposeVolumes
from perdure.types import Build, Healthcheck, SharedFolder, Sidecar
from perdure.types.containers import MAIN
from perdure.types.validation_errors import faults

NAME = "docker-compose.yaml"
"""The only name that Harbor reads."""
OWN_IMAGE = "perdure-main-image"
"""Our value for Harbor's variable MAIN_IMAGE_NAME."""
WITHOUT_EFFECT = frozenset(
    [
        "expose",
        "init",
        "labels",
        "logging",
        "platform",
        "pull_policy",
        "stdin_open",
        "stop_grace_period",
        "stop_signal",
        "tmpfs",
        "tty",
        "mem_reservation",
    ]
)
"""Keys that Perdure ignores: nothing outside reaches a sandbox, and its end kills sidecars."""
FILES_FIX = "COPY the files in a Dockerfile"
REASONS: Mapping[str, str] = {
    "configs": FILES_FIX,
    "secrets": FILES_FIX,
    "env_file": "write the variables under `environment`",
    "network_mode": "all containers of a sandbox share one network",
    "privileged": "sidecars have a fixed subset of Docker's capabilities",
    "cap_add": "sidecars have a fixed subset of Docker's capabilities",
}
IDLE = (["sh", "-c", "sleep infinity"], ["sleep", "infinity"], ["tail", "-f", "/dev/null"])
"""Commands that keep `main` alive; a sandbox needs none."""
COMPLETED = "service_completed_successfully"
CONDITIONS = {"service_started": "started", "service_healthy": "healthy", COMPLETED: "started"}
DURATION = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)")
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
MEGABYTES = {"": 1 / (1 << 20), "k": 1 / (1 << 10), "m": 1.0, "g": 1024.0, "t": float(1 << 20)}
VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:?-)([^}]*))?\}|(\w+))")


@dataclass
class ComposeFile:
    """What a task's compose file asks for."""

    sidecars: dict[str, Sidecar] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the sandbox's own container."""
    folders: tuple[SharedFolder, ...] = ()
    """Volumes that it shares with others."""
    problems: list[str] = field(default_factory=list)


def read_compose_file(path: Path, env: Mapping[str, str], build_timeout_s: float) -> ComposeFile:
    """`env`: the task's variables, with which `${NAME}` is replaced. Harbor also takes variables of
    its host, but a task must not read ours."""
    found = ComposeFile()
    try:
        content = yaml.safe_load(path.read_text())
        services = dict(content["services"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        found.problems.append(f"its {NAME} has no table `services`: {error}")
        return found
    found.problems += [
        f"{NAME}: it does not support `{key}`"
        for key in content
        if key not in ("services", "version", "name", "networks", "volumes")
        and not str(key).startswith("x-")
    ]
    reader = _Reader(path.parent, {**env, "CONTEXT_DIR": CONTEXT, "MAIN_IMAGE_NAME": OWN_IMAGE})
    for name, service in services.items():
        reader.service, table = str(name), dict(service or {})
        if name == MAIN:
            found.env = reader.main(table)
        elif (sidecar := reader.sidecar(table, build_timeout_s)) is not None:
            found.sidecars[str(name)] = sidecar
    for name, mount in reader.volumes.shared(content.get("volumes") or {}):
        if name == MAIN:
            found.folders += (mount,)
        elif name in found.sidecars:
            sidecar = found.sidecars[name]
            folders = (*sidecar.folders, mount)
            found.sidecars[name] = sidecar.model_copy(update={"folders": folders})
    found.problems += [f"{NAME}: {problem}" for problem in reader.volumes.problems]
    for name in reader.completing & found.sidecars.keys():
        found.sidecars[name] = found.sidecars[name].model_copy(update={"completes": True})
    reader.check_network({str(name): dict(one or {}) for name, one in services.items()})
    found.problems += reader.problems
    return found


class _Reader:
    """Reads services one by one, and collects what is wrong with them."""

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder, self.variables = folder, variables
        self.service = ""
        self.volumes = ComposeVolumes(folder)
        self.problems: list[str] = []
        self.completing: set[str] = set()
        """Services that another one waits for until they have exited."""

    def main(self, table: dict[str, Any]) -> dict[str, str]:
        """The variables of the main service. Its image and command are the sandbox's."""
        build = self._build_of(table.pop("build", CONTEXT))
        if build != (self.folder, "Dockerfile"):
            self._refuse("build", "`main` uses the image of the task's environment")
        if self._text(table.pop("image", OWN_IMAGE)) != OWN_IMAGE:
            self._refuse("image", "set `environment.docker_image` in task.toml")
        if (command := table.pop("command", None)) and self._words(command) not in IDLE:
            self._refuse("command", "only the agent's commands run in `main`")
        if self._volumes(table.pop("volumes", None)):
            self._refuse("volumes", FILES_FIX)
        self._conditions(table.pop("depends_on", None))
        for key in ("container_name", "hostname", "ports", "networks"):
            table.pop(key, None)
        env = self._environment(table.pop("environment", None))
        self._refuse_rest(table)
        return env

    def sidecar(self, table: dict[str, Any], build_timeout_s: float) -> Sidecar | None:
        """None if the service has a problem, which is then recorded."""
        before = len(self.problems)
        limits = ((table.pop("deploy", None) or {}).get("resources") or {}).get("limits") or {}
        build = None
        if "build" in table:
            folder, dockerfile = self._build_of(table.pop("build"))
            if dockerfile != "Dockerfile" or not (folder / dockerfile).is_file():
                self._refuse("build", "give a folder with a `Dockerfile`, and no build options")
            build = Build(path=str(folder.absolute()), timeout_s=build_timeout_s)
            table.pop("image", None)
        names = [table.pop(key, None) for key in ("container_name", "hostname")]
        names += _network_aliases(table.get("networks"))
        memory = table.pop("mem_limit", limits.get("memory"))
        cpus = table.pop("cpus", limits.get("cpus"))
        test = table.pop("healthcheck", None)
        fields = {
            "image": self._text(table.pop("image", None)),
            "build": build,
            "entrypoint": self._words(table.pop("entrypoint", None)),
            "command": self._words(table.pop("command", None)),
            "env": self._environment(table.pop("environment", None)),
            "files": self._volumes(table.pop("volumes", None)),
            "workdir": self._text(table.pop("working_dir", None)),
            "user": self._text(table.pop("user", None)),
            "aliases": [name for name in map(self._text, names) if name],
            "healthcheck": self._healthcheck(test),
            "checks_health": not _is_disabled(test),
            "depends_on": self._conditions(table.pop("depends_on", None)),
            "restart": self._text(table.pop("restart", None)) or "no",
            "memory_mb": self._megabytes(memory),
            "cpus": self._text(cpus),
        }
        for key in ("ports", "networks"):  # see `check_network`
            table.pop(key, None)
        self._refuse_rest(table)
        try:
            return Sidecar.model_validate(fields) if len(self.problems) == before else None
        except ValidationError as error:
            self.problems.append(f"{NAME}: services.{self.service}: {faults(error)}")
            return None

    def check_network(self, services: Mapping[str, Mapping[str, Any]]) -> None:
        """All containers of a sandbox share one network, so two cannot listen on the same port."""
        joined = {frozenset(one.get("networks") or ("default",)) for one in services.values()}
        joined |= {frozenset(["default"])} if MAIN not in services else set()
        if len(joined) > 1:
            self.problems.append(f"{NAME}: its services are in different networks; Perdure has one")
        users: dict[str, str] = {}
        for name, table in services.items():
            ports = {
                _container_port(one) for key in ("ports", "expose") for one in table.get(key) or ()
            }
            for port in sorted(ports):
                if users.setdefault(port, name) != name:
                    self.problems.append(
                        f"{NAME}: {users[port]} and {name} both listen on port {port}, but all "
                        "containers of a sandbox share one network: change one of the ports"
                    )

    # -- values -----------------------------------------------------------------------------------

    def _refuse(self, key: str, reason: str) -> None:
        self.problems.append(
            f"{NAME}: it does not support `services.{self.service}.{key}`: {reason}"
        )

    def _refuse_rest(self, table: Mapping[str, Any]) -> None:
        for key in table.keys() - WITHOUT_EFFECT:
            if table[key] not in (None, [], {}, False):
                self._refuse(key, REASONS.get(key, "Perdure has no equivalent"))

    def _text(self, value: Any) -> str | None:
        """With its variables replaced, as compose does."""
        return None if value is None else VARIABLE.sub(self._variable, _shown(value))

    def _variable(self, match: re.Match[str]) -> str:
        dollar, braced, _, default, plain = match.groups()
        if dollar:
            return "$"
        name = braced or plain
        value = self.variables.get(name, default)
        if value is None:
            self._refuse(f"${{{name}}}", "set it in `environment.env`; the host's are not read")
        return value or default or ""

    def _volumes(self, entries: Any) -> dict[str, str]:
        """Paths inside -> files of the task's folder."""
        return self.volumes.read(self.service, entries or (), lambda text: self._text(text) or "")

    def _words(self, value: Any) -> list[str] | None:
        if value is None:
            return None
        if isinstance(value, list):
            return [self._text(one) or "" for one in value]
        return shlex.split(self._text(value) or "")

    def _environment(self, value: Any) -> dict[str, str]:
        pairs = value or {}
        if isinstance(pairs, list):
            pairs = {
                name: value if equals else None
                for name, equals, value in (str(one).partition("=") for one in pairs)
            }
        lacking = [name for name, one in pairs.items() if one is None]
        for name in lacking:
            self._refuse(f"environment.{name}", "it has no value; the host's are not read")
        return {
            str(name): self._text(one) or "" for name, one in pairs.items() if name not in lacking
        }

    def _build_of(self, value: Any) -> tuple[Path, str]:
        """The context, and the Dockerfile in it; empty if other keys are set."""
        table = value if isinstance(value, dict) else {"context": value}
        context = (self._text(table.get("context", ".")) or ".").replace(CONTEXT, ".")
        folder = (self.folder / context).resolve()
        if not folder.is_relative_to(self.folder.resolve()) or table.keys() - {
            "context",
            "dockerfile",
        }:
            return folder, ""
        return (self.folder if folder == self.folder.resolve() else folder), str(
            table.get("dockerfile", "Dockerfile")
        )

    def _healthcheck(self, value: Any) -> Healthcheck | None:
        table = dict(value or {})
        if _is_disabled(value) or "test" not in table:
            return None
        test = table["test"]
        words = ["CMD-SHELL", test] if isinstance(test, str) else list(test)
        words = [self._text(one) or "" for one in words]
        argv = words[1:] if words[0] == "CMD" else ["/bin/sh", "-c", *words[1:]]
        times = {
            field: seconds
            for key, field in (
                ("interval", "interval_s"), ("timeout", "timeout_s"), ("start_period", "start_period_s")
            )
            if (seconds := self._seconds(table.get(key), key)) is not None
        }  # fmt: skip
        retries = {"retries": int(table["retries"])} if "retries" in table else {}
        return Healthcheck(command=tuple(argv), **times, **retries)

    def _seconds(self, value: Any, key: str) -> float | None:
        if value is None:
            return None
        found = DURATION.findall(str(value))
        if "".join(number + unit for number, unit in found) != str(value):
            self._refuse(f"healthcheck.{key}", f"{value!r} is not a duration such as `10s`")
        return sum(float(number) * SECONDS[unit] for number, unit in found) or None

    def _megabytes(self, value: Any) -> int | None:
        if value is None:
            return None
        match = SIZE.fullmatch(str(self._text(value)).strip())
        if match is None:
            self._refuse("mem_limit", f"{value!r} is no size, such as `512m`")
            return None
        return max(6, int(float(match[1]) * MEGABYTES[match[2].lower()]))

    def _conditions(self, value: Any) -> dict[str, str]:
        table = {name: {} for name in value} if isinstance(value, list) else dict(value or {})
        named = {
            str(name): (one or {}).get("condition", "service_started")
            for name, one in table.items()
        }
        for name, condition in named.items():
            if condition not in CONDITIONS or name == MAIN:
                self._refuse(f"depends_on.{name}", f"Perdure cannot wait for {condition!r}")
            if condition == COMPLETED:
                self.completing.add(name)
        return {name: CONDITIONS.get(condition, "started") for name, condition in named.items()}


def _network_aliases(networks: Any) -> list[Any]:
    """The service's aliases in its networks. Networks in a list have none."""
    tables = networks.values() if isinstance(networks, dict) else ()
    lists = [table.get("aliases") for table in tables if isinstance(table, dict)]
    return [name for names in lists if isinstance(names, list) for name in names]


def _is_disabled(healthcheck: Any) -> bool:
    table = healthcheck or {}
    return bool(table.get("disable")) or table.get("test") in ("NONE", ["NONE"])


def _container_port(entry: Any) -> str:
    """Example: `127.0.0.1:8080:80/tcp` -> `80`."""
    port = entry.get("target") if isinstance(entry, dict) else entry
    return str(port).rpartition(":")[2].partition("/")[0]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
