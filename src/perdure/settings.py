"""One settings model for every process: `PERDURE_*` variables, or `perdure.toml`.

Each field is explained by the string under it; `perdure doctor` and docs/settings.md print these.
Temporal's own address, namespace, TLS and profile come from the CLI's variables and files
(`TEMPORAL_ADDRESS`, `TEMPORAL_NAMESPACE`, `TEMPORAL_PROFILE`, ...), not from here.
"""

import difflib
import os
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from perdure import registry
from perdure.errors import ConfigurationError
from perdure.types import AccountCaps

PREFIX = "PERDURE_"


class Settings(BaseSettings):
    """Resolved once per process; `run.json` keeps the resolved copy beside each run."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        toml_file=os.environ.get("PERDURE_CONFIG", "perdure.toml"),
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    home: Path = Path(".perdure")
    """Folder of everything local: Temporal's database, logs, pids, sandboxes, caches, journal."""
    store: str = ""
    """Where results lie: a folder, or `s3://bucket/prefix`. Empty = `<home>/store`."""
    s3_endpoint_url: str | None = None
    """S3 API to talk to, when it is not AWS. Credentials come from AWS_* variables."""
    ui_port: int = Field(8233, ge=1, le=65535)
    """Port of the Temporal web UI that `perdure up` starts."""
    temporal_port: int = Field(7233, ge=1, le=65535)
    """Port of the Temporal server that `perdure up` starts."""
    gateway_port: int = Field(18001, ge=0, le=65535)
    """TCP port of the gateway (slime: SHIM_PORT)."""
    gateway_host: str = "127.0.0.1"
    """Address the gateway listens on (slime: SHIM_BIND_HOST)."""
    gateway_processes: int = Field(1, ge=1, le=64)
    """Gateway processes that `perdure up` starts on that port. One serves about 100 turns a second."""
    gateway_durability: Literal["local", "store"] = "local"
    """What an answer waits for: `local` disk (an S3 store follows seconds later), or the `store`."""
    gateway_url: str = ""
    """Gateway as the workers reach it. Empty = `http://<gateway_host>:<gateway_port>`."""
    gateway_reach: Literal["auto", "url", "socket", "dial", "stdio", "file"] = "auto"
    """How sandboxes reach it: `url`, unix `socket`, a relay (`dial`, `stdio`, `file`), or `auto`."""
    engine_url: str = ""
    """Inference server behind the gateway, or several: `URL=WEIGHT,URL`. Empty = OPENAI_BASE_URL, else ANTHROPIC_BASE_URL, else none."""
    engine_kind: str = "auto"
    """`vllm`, `sglang` (token endpoints), `openai` or `anthropic` (hosted, trainable: false), or `auto`."""
    engine_model: str = ""
    """Model name sent to the engine. Empty = OPENAI_MODEL / ANTHROPIC_MODEL, else the rollout's own `model`."""
    engine_api_key_env: str = ""
    """Name of the variable that holds the engine's key. Empty = OPENAI_API_KEY / ANTHROPIC_API_KEY."""
    engine_hang_s: float = Field(120.0, gt=0)
    """An engine that gives no token for so long, with calls waiting, is left and asked again."""
    tokenizer: str = "qwen3"
    """Tokenizer of the served model: `qwen3`, or a folder with tokenizer.json."""
    boot_slots: int = Field(8, ge=1)
    """Sandboxes that one worker boots at once (slime: SWE_BOOT_CONCURRENCY)."""
    agent_slots: int = Field(64, ge=1)
    """Agent runs that one worker watches at once."""
    grade_slots: int = Field(8, ge=1)
    """Gradings that one worker runs at once."""
    io_slots: int = Field(32, ge=1)
    """Captures, episodes and clean-ups that one worker runs at once."""
    sandbox_caps: dict[str, AccountCaps] = Field(default_factory=dict)
    """Caps of provider accounts, shared by all workers: `{"e2b": {"live": 20, "creates_per_s": 5}}`."""
    ready_sandboxes: int = Field(0, ge=0)
    """Agents' sandboxes that a worker boots ahead, for each environment it booted lately."""
    ready_sandboxes_total: int = Field(16, ge=1)
    """Those of one worker together. On a metered account they hold slots that nobody waits for."""
    sandbox_ttl_s: float = Field(3600.0, ge=60)
    """A sandbox nobody heartbeats for this long is killed by its provider or the reaper."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Prometheus port of a process; 0 = none."""
    metrics_host: str = "127.0.0.1"
    """Address that port listens on; `0.0.0.0` in a container."""
    log_json: bool = True
    """Log one JSON object a line; False prints for people."""

    @field_validator("sandbox_caps")
    @classmethod
    def _providers_are_known(cls, caps: dict[str, AccountCaps]) -> dict[str, AccountCaps]:
        for name in caps:
            try:
                registry.path_of("sandbox", registry.SANDBOXES, name)
            except ConfigurationError as error:
                raise ValueError(str(error)) from None
        return caps

    @field_validator("gateway_url", "s3_endpoint_url")
    @classmethod
    def _urls_have_a_scheme(cls, url: str | None) -> str | None:
        if url and not url.startswith(("http://", "https://")):
            raise ValueError("write a URL that starts with http:// or https://")
        return url

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def store_url(self) -> str:
        return self.store or str(self.home.absolute() / "store")

    @property
    def gateway_base_url(self) -> str:
        return self.gateway_url or f"http://{self.gateway_host}:{self.gateway_port}"

    @property
    def gateway_socket(self) -> Path:
        """The gateway's unix socket, bound into local sandboxes."""
        return self.home.absolute() / "run" / "gateway.sock"


def load_settings() -> Settings:
    """Raises: ConfigurationError naming the variable or the TOML key, and the fix."""
    try:
        return Settings()
    except ValidationError as error:
        raise ConfigurationError(_complaint(error)) from error
    except SettingsError as error:
        raise ConfigurationError(_no_json(error)) from error
    except ValueError as error:  # the TOML file does not parse
        raise ConfigurationError(f"{toml_file()}: {error}") from error


def toml_file() -> Path:
    """The file that would be read; it need not exist."""
    return Path(str(Settings.model_config.get("toml_file"))).absolute()


def _complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    variable, inner = PREFIX + str(first["loc"][0]).upper(), ".".join(map(str, first["loc"][1:]))
    message = first["msg"].removeprefix("Value error, ")
    told = f"{message[:1].lower()}{message[1:]}"
    if inner and variable in os.environ:
        unknown = first["type"] == "extra_forbidden"
        return f"{variable}: {inner!r} " + ("is no field of it" if unknown else f"is wrong: {told}")
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(name, Settings.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else "`perdure settings` lists them"
        return f"{toml_file().name}: {name!r} is no setting: {hint}"
    where = variable if variable in os.environ else f"{toml_file().name}: {name}"
    return f"{where}={first['input']!r}: {told}"


def _no_json(error: SettingsError) -> str:
    """A variable whose value is an object, and was not written as one."""
    field = re.search(r'field "(\w+)"', str(error))
    variable = PREFIX + (field[1].upper() if field else "?")
    return f"{variable}={os.environ.get(variable, '')!r} is not JSON: {error.__cause__}"
