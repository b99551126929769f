"""The tree of settings: one model per subject and per sandbox provider.

A variable's name is the path in this tree: `gateway.port` is `PERDURE_GATEWAY__PORT`, or `port` in
the table `[gateway]` of `perdure.toml`. Users read the string under each field: `perdure settings`
prints it, and docs/settings.md is generated from it. `perdure.settings.settings_loader` finds the values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from perdure import variant_registry
from perdure.errors import ConfigurationError
from perdure.settings import process_environment, variable_aliases
from perdure.types import AccountCaps, ApiLimits
from perdure.types.allowed_hosts import allowed_hosts

PREFIX = "PERDURE_"
DELIMITER = "__"
CLOCK = r"([01]\d|2[0-3]):[0-5]\d"
HOURS = rf"^({CLOCK}-{CLOCK})?$"


class Group(BaseModel):
    """The settings of one subject."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class TemporalSettings(Group):
    """Your Temporal server, or the dev server that `perdure up` starts if none is set. These settings
    override Temporal's own variables and profiles."""

    address: str = ""
    """`host:port` of your server. Empty = `TEMPORAL_ADDRESS` or a profile, otherwise the dev server."""
    namespace: str = ""
    """Its namespace. Empty = `TEMPORAL_NAMESPACE` or the profile's, otherwise the one in a Temporal Cloud address, otherwise `default`."""
    api_key: SecretStr = Field(SecretStr(""), exclude=True)
    """API key. It turns TLS on."""
    tls: Literal["auto", "on", "off"] = "auto"
    """Whether to use TLS. `auto`: for Temporal Cloud, and if a key, a certificate or an authority is set."""
    tls_ca_file: Path | None = None
    """Certificates of the server's authority. Empty = the system's."""
    tls_cert_file: Path | None = None
    """Client certificate for mTLS."""
    tls_key_file: Path | None = None
    """Private key of the client certificate."""
    tls_server_name: str = ""
    """Name in the server's certificate, if it differs from the address."""
    codec_keys_file: Path | None = None
    """File of keys that encrypt all payloads, one `<id> <base64 of 32 bytes>` per line, newest first. Empty = no encryption."""
    port: int = Field(7233, ge=1, le=65535)
    """Port of the dev server."""
    ui_port: int = Field(8233, ge=1, le=65535)
    """Port of the dev server's Web UI."""
    ui_url: str = ""
    """URL of the Web UI, for links and the codec server. Empty = the dev server's."""
    viewer_url: str = ""
    """URL of the trajectory viewer, for links in the Web UI. Empty = they name a command."""

    @field_validator("address")
    @classmethod
    def _has_no_scheme(cls, address: str) -> str:
        if "://" in address or "/" in address:
            raise ValueError("write host:port, without a scheme or a path")
        return address

    @field_validator("ui_url", "viewer_url")
    @classmethod
    def _has_a_scheme(cls, url: str) -> str:
        return _with_scheme(url).rstrip("/")


class GatewaySettings(Group):
    """The gateway, which agents call as their model's API."""

    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on."""
    port: int = Field(18001, ge=0, le=65535)
    """TCP port. 0 = any free port."""
    url: str = ""
    """URL by which workers and sandboxes reach the gateway. Empty = the one that a gateway wrote to the store, otherwise `http://<host>:<port>`."""
    reach: Literal["auto", "url", "socket", "stdio"] = "auto"
    """How sandboxes reach the gateway: `url`, a unix `socket`, a relay (`stdio`), or `auto`."""
    processes: int = Field(1, ge=1, le=64)
    """Gateway processes that `perdure up` starts. One serves about 250 turns of 30k tokens per second."""
    calls_per_minute: int = Field(1_200, ge=1)
    """Model calls per minute that one session may start in one gateway process. Further calls wait."""
    tokens_per_minute: int = Field(400_000, ge=1)
    """Tokens per minute that one session may sample in one gateway process. Further calls wait."""
    mcp_hosts: str = ""
    """Hosts of MCP servers that dataset rows may name, as in the URL: `HOST:PORT,HOST`."""

    @field_validator("url")
    @classmethod
    def _has_a_scheme(cls, url: str) -> str:
        return _with_scheme(url)


class EngineSettings(Group):
    """The inference server that samples for the agents."""

    url: str = ""
    """One server, or several with weights: `URL=WEIGHT,URL`. Empty = `OPENAI_BASE_URL`, otherwise `ANTHROPIC_BASE_URL`, otherwise none."""
    kind: str = Field("auto", min_length=1)
    """`vllm` or `sglang` (exact tokens), `openai` or `anthropic` (hosted, so `trainable: false`), or `auto`."""
    model: str = ""
    """Model name in requests to the server. Empty = `OPENAI_MODEL` or `ANTHROPIC_MODEL`, otherwise the rollout's `model`."""
    tokenizer: str = Field("qwen3", min_length=1)
    """Tokenizer of the served model: `qwen3`, or a folder that contains tokenizer.json."""
    tool_call_parser: str = Field("auto", min_length=1)
    """The model's tool-call parser, as vLLM names it; `text` if it makes no calls. `auto` = the one for its chat template."""
    api_key_env: str = ""
    """Variable that contains the server's API key. Empty = `OPENAI_API_KEY` or `ANTHROPIC_API_KEY`."""
    agents: int = Field(128, ge=1)
    """Most agents per `vllm` or `sglang` engine. Others wait, and that wait is not engine time. A hosted API has no such limit."""
    hang_s: float = Field(120.0, gt=0)
    """If an engine with waiting calls produces no token for this many seconds, its calls move."""
    park_after_s: float = Field(300.0, gt=0)
    """If the quota of a hosted API resets in more seconds than this, its rollouts wait without sandboxes."""
    open_hours: str = Field("", pattern=HOURS)
    """Hours (UTC) in which models are called, such as `22:00-06:00`; outside them, rollouts are parked. Empty = always."""
    limits: ApiLimits = ApiLimits()
    """Limits of a hosted API's account over all gateways, runs and models: `{"requests": {"minute": 500}, "tokens": {"day": 50000000}, "dollars": {"hour": 4}, "price": {"input": 1.25, "output": 10}}`. Also `input_tokens`, `output_tokens`, and `cached` in `price`."""


class SlotSettings(Group):
    """Activities of each stage that one worker runs at once."""

    boot: int = Field(8, ge=1)
    """Sandbox boots."""
    agent: int = Field(64, ge=1)
    """Seats of the worker's home: its agents with a sandbox. Further rollouts wait without one."""
    grade: int = Field(8, ge=1)
    """Gradings. With twins, each has two or three sandboxes."""
    io: int = Field(32, ge=1)
    """Captures, episodes and cleanups."""


class DeploymentSettings(Group):
    """The build that a worker runs. Open rollouts stay on the build that started them."""

    build_id: str = Field("", pattern=r"^[A-Za-z0-9_.+-]{0,64}$")
    """Name of this build, for example its git commit. Empty = any worker may continue a rollout."""
    name: str = Field("perdure", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Name of the deployment in Temporal. All builds share it."""


class HostSettings(Group):
    """A worker's host and its sandboxes."""

    silent_s: float = Field(72.0, ge=4)
    """A host without a heartbeat for this many seconds is lost: its sandboxes are killed, and its rollouts move. Must be equal on all hosts."""
    grades_apart: bool = False
    """Whether to refuse role `grade` in a home with role `boot` or `agent`, so that other machines grade."""


class SandboxSettings(Group):
    """Sandboxes of all providers."""

    ttl_s: float = Field(3600.0, ge=60)
    """A sandbox that no worker renews for this many seconds is killed."""
    open_files: int = Field(4096, ge=64)
    """Files that one process in a sandbox on a worker's host or in Docker may open, at most half of the worker's hard limit."""
    user_ids: int = Field(2_000_000_000, ge=0, le=(1 << 32) - (1 << 17))
    """If the worker is root, each bubblewrap sandbox runs as its own host user, one of 65,536 ids from this one on. Containers on one machine need disjoint ranges. 0 = all run as the worker's user."""
    caps: dict[str, AccountCaps] = Field(default_factory=dict)
    """Limits of provider accounts, shared by all workers: `{"e2b": {"live": 20, "creates_per_s": 5, "starting": 16}}`."""
    open_hours: dict[str, Annotated[str, Field(pattern=HOURS)]] = Field(default_factory=dict)
    """Hours (UTC) in which sandbox accounts are used: `{"e2b": "22:00-06:00"}`."""
    allow_local: bool = False
    """Whether to allow `--sandbox local`, whose commands have your user, files and network."""
    build_hosts: str = ""
    """Hosts that builds may reach in addition to the package index: `github.com,files.example:8443`."""
    row_hosts: str = ""
    """Hosts that rows may list in `phases.agent.network` and `phases.grade.network`: `pypi.org,*.example.com,10.1.0.0/16:8443`."""
    image_mirror: str = ""
    """Registry to pull images from: a prefix `mirror.example/hub/`, or replacements `docker.io=mirror.example/hub,...`."""
    pull_timeout_s: float = Field(1200.0, gt=0)
    """Seconds that the pull of one image may take."""
    image_map: Path | None = None
    """JSON file that maps an image to the template, snapshot or image built from it, also per provider."""

    @field_validator("row_hosts")
    @classmethod
    def _rows_hosts_are_entries(cls, row_hosts: str) -> str:
        allowed_hosts(row_hosts.replace(",", " ").split())
        return row_hosts

    @field_validator("caps", "open_hours")
    @classmethod
    def _providers_are_known(cls, by_provider: dict[str, Any]) -> dict[str, Any]:
        for name in by_provider:
            try:
                variant_registry.path_of("sandbox", variant_registry.SANDBOXES, name)
            except ConfigurationError as error:
                raise ValueError(str(error)) from None
        return by_provider


class ApptainerSettings(Group):
    """Apptainer sandboxes on the worker's host."""

    program: Path | None = None
    """Path of the apptainer program, if it is not in a system folder."""


class DockerSettings(Group):
    """Sandboxes of a Docker engine. `DOCKER_HOST` or Docker's context selects the engine."""

    image: str = Field("docker.io/library/python:3.11-bookworm", min_length=1)
    """Image for instances that have a tree and no image. It needs python3, bash and git. The proxy of a build
    runs in it, or in a base image with python3 if this one is not here."""
    network: str = ""
    """The engine's network for all phases, including agents and grading. Empty = none."""
    runtime: str = ""
    """Runtime of the engine, e.g. `runsc`. Empty = the engine's default."""
    scope: str = ""
    """Name of this deployment on a shared engine, equal on all its hosts. Empty = one per home."""


class KubernetesSettings(Group):
    """Sandboxes that are pods, in the cluster that `KUBECONFIG` names or that the worker runs in."""

    context: str = ""
    """Context of the kubeconfig. Empty = its current context."""
    namespace: str = Field("perdure-sandboxes", min_length=1)
    """Namespace of the sandboxes."""
    image: str = Field("docker.io/library/python:3.11-bookworm", min_length=1)
    """Image for instances that have a tree and no image. It needs python3, bash and git."""
    pod_file: Path | None = None
    """JSON file of pod fields for this cluster, such as tolerations."""
    scope: str = ""
    """Name of this deployment in a shared namespace, equal on all its hosts. Empty = one per home."""


class E2BSettings(Group):
    """Sandboxes of an E2B account. The SDK's own `E2B_*` variables select the account."""

    template: str = Field("base", min_length=1)
    """Template into which trees are uploaded."""
    metadata_file: Path | None = None
    """JSON file of routing tags, for a proxy that finds a sandbox's image by its metadata."""
    metadata_image_key: str = ""
    """Key of the image in that file."""
    scope: str = ""
    """Name of this deployment in a shared account, equal on all its hosts. Empty = one per home."""


class DaytonaSettings(Group):
    """Sandboxes of a Daytona account. The SDK's own `DAYTONA_*` variables select the account."""

    snapshot: str = ""
    """Snapshot into which trees are uploaded. Empty = the account's default."""
    scope: str = ""
    """Name of this deployment in a shared account, equal on all its hosts. Empty = one per home."""


class ModalSettings(Group):
    """Sandboxes of a Modal account. The SDK's own `MODAL_*` variables select the account."""

    app: str = Field("perdure", min_length=1)
    """App that owns the sandboxes. Created if missing."""
    image: str = Field("docker.io/library/python:3.11-bookworm", min_length=1)
    """Image for instances that have a tree and no image. It needs python3, bash and git."""
    gpu: str = ""
    """GPU of sandboxes without `limits.gpu`, such as `T4` or `A100:2`. Empty = none."""
    scope: str = ""
    """Name of this deployment in a shared account, equal on all its hosts. Empty = one per home."""


class GradingSettings(Group):
    """Grading."""

    signals_file: Path | None = None
    """TOML file of `rule = 'pattern'` that replaces the rules for signals, words in a patch that deserve a look."""
    reward_model_hosts: str = ""
    """Hosts of reward models that requests may name: `HOST:PORT,HOST`. Empty = any, without a key."""
    reward_model_key_env: str = ""
    """Variable with these hosts' API key."""


class AgentSettings(Group):
    """Agent programs, for hosts without access to a package registry."""

    claude_code_tarball: Path | None = None
    """npm package of Claude Code: native (`claude-code-linux-x64-*.tgz`), or for Node."""
    codex_tarball: Path | None = None
    """npm package of Codex."""
    opencode_tarball: Path | None = None
    """npm package of OpenCode."""
    ripgrep_tarball: Path | None = None
    """npm package `@vscode/ripgrep-linux-x64`, for OpenCode."""
    qwen_code_tarball: Path | None = None
    """npm package of Qwen Code."""
    gemini_cli_tarball: Path | None = None
    """npm package of Gemini CLI."""
    node_tarball: Path | None = None
    """Node, for Qwen Code, Gemini CLI, `acp`, and a Claude Code package that needs it: its npm package or `node-v*-linux-x64.tar.xz`."""
    npm_tarball: Path | None = None
    """npm package of npm, which installs packages for `acp`."""
    openhands_python: str = ""
    """Python 3.12 or later, for OpenHands. Empty = from uv, PATH or pyenv."""
    terminus_2_python: str = ""
    """Python 3.12 or later, for Terminus 2. Empty = from uv, PATH or pyenv."""


class MetricsSettings(Group):
    """The Prometheus port of each worker. The gateway serves /metrics on its port."""

    port: int = Field(0, ge=0, le=65535)
    """Port. 0 = none."""
    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on. Use `0.0.0.0` in a container."""


class TraceSettings(Group):
    """OpenTelemetry traces of all processes. All `OTEL_*` variables apply."""

    endpoint: str = ""
    """OTLP/HTTP endpoint, such as `http://collector:4318`. Empty = `OTEL_EXPORTER_OTLP_ENDPOINT`, otherwise no traces."""

    @field_validator("endpoint")
    @classmethod
    def _has_a_scheme(cls, url: str) -> str:
        return _with_scheme(url).rstrip("/")


class Settings(BaseSettings):
    """All settings, resolved once per process. Each run keeps a copy in its `run.json`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter=DELIMITER,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    home: Path = Path(".perdure")
    """Folder for all local data: Temporal's database, logs, pids, sandboxes, caches."""
    store: str = ""
    """Place of results: a folder, or `s3://bucket/prefix`. Empty = `<home>/store`."""
    s3_endpoint_url: str = ""
    """URL of the S3 API, if it is not Amazon's. Credentials come from the `AWS_*` variables."""
    secret: SecretStr = Field(SecretStr(""), exclude=True)
    """Secret from which session keys are derived, equal in all processes. Empty = a file in the home."""
    secret_previous: SecretStr = Field(SecretStr(""), exclude=True)
    """Earlier secrets, separated by commas, that are accepted during a rotation."""
    diff_max_bytes: int = Field(10 << 20, ge=1, le=64 << 20)
    """Largest diff of an agent, in bytes. A larger one counts as no diff: `patch_too_large`."""
    handlers: str = ""
    """Modules that register handlers of data sources, separated by commas."""

    temporal: TemporalSettings = TemporalSettings()
    gateway: GatewaySettings = GatewaySettings()
    engine: EngineSettings = EngineSettings()
    slots: SlotSettings = SlotSettings()
    deployment: DeploymentSettings = DeploymentSettings()
    host: HostSettings = HostSettings()
    sandbox: SandboxSettings = SandboxSettings()
    apptainer: ApptainerSettings = ApptainerSettings()
    docker: DockerSettings = DockerSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    e2b: E2BSettings = E2BSettings()
    daytona: DaytonaSettings = DaytonaSettings()
    modal: ModalSettings = ModalSettings()
    grading: GradingSettings = GradingSettings()
    agents: AgentSettings = AgentSettings()
    metrics: MetricsSettings = MetricsSettings()
    traces: TraceSettings = TraceSettings()

    @field_validator("s3_endpoint_url")
    @classmethod
    def _has_a_scheme(cls, url: str) -> str:
        return _with_scheme(url)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        toml = TomlConfigSettingsSource(settings_cls, process_environment.toml_file())
        return init_settings, env_settings, _Aliases(settings_cls), toml

    def changed(self, **groups: Mapping[str, Any]) -> "Settings":
        """A copy with other values in some groups.

        Example: settings.changed(metrics={"port": 0})
        """
        update = {
            name: getattr(self, name).model_copy(update=dict(values))
            for name, values in groups.items()
        }
        return self.model_copy(update=update)

    @property
    def store_url(self) -> str:
        return self.store or str(self.home.absolute() / "store")

    @property
    def gateway_base_url(self) -> str:
        return self.gateway.url or f"http://{self.gateway.host}:{self.gateway.port}"

    @property
    def gateway_socket(self) -> Path:
        """The gateway's unix socket, bound into local sandboxes."""
        return self.home.absolute() / "run" / "gateway.sock"


class _Aliases(PydanticBaseSettingsSource):
    """A source of values: variables of other systems that set a setting."""

    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError  # the whole tree comes from one call

    def __call__(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for path, value in variable_aliases.read_alias_settings().items():
            group, _, name = path.partition(".")
            tree.setdefault(group, {})[name] = value
        return tree


def _with_scheme(url: str) -> str:
    if url and not url.startswith(("http://", "https://")):
        raise ValueError("write a URL that starts with http:// or https://")
    return url
