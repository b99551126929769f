"""Servers of the Model Context Protocol (MCP), whose tools an agent may call.

An agent reaches `http` and `sse` ones through the gateway, which adds their credentials, unless they
are in its sandbox. `stdio` ones are programs of the sandbox, which the agent's own program starts.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, field_validator, model_validator

from perdure.types.base import Request

McpName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]
"""A server's name. It becomes part of the names of its tools, which are at most 64 characters."""
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""A placeholder in a header. The gateway replaces `${NAME}` with its own variable `MCP_NAME`."""
SECRET_HEADER = re.compile(r"authorization|cookie|key|token|secret|password", re.IGNORECASE)
SECRET_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$", re.IGNORECASE)
HTTP_NAMES = ("http", "streamable-http", "streamableHttp")
MOST_SERVERS = 16

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")


class McpServer(Request):
    """One server, in the form of Claude Code's `.mcp.json`: `url` or `command`.

    Example:
        {"type": "http", "url": "https://docs.example/mcp",
         "headers": {"Authorization": "Bearer ${DOCS_TOKEN}"}}
        {"command": "python3", "args": ["-m", "calculator"]}
    """

    type: Literal["http", "sse", "stdio"]
    """`sse`: the older transport over HTTP, of a stream of events and an address for messages."""
    url: str = ""
    """Address of an `http` or `sse` server without credentials, as seen from the gateway, or from the
    sandbox if `in_sandbox`."""
    in_sandbox: bool = False
    """The server runs in the sandbox, for example in a sidecar, and the agent calls it without the
    gateway."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Headers of each request. The gateway replaces `${NAME}` with its variable `MCP_NAME`. A server in
    the sandbox can have no `${NAME}`."""
    command: str = ""
    """Program of a `stdio` server, in the sandbox."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Extra environment variables for the program; no secrets."""
    timeout_s: float = Field(300.0, gt=0, le=3600)
    """Time limit of one call in seconds. A call that exceeds it returns an error to the agent."""

    @model_validator(mode="before")
    @classmethod
    def _names_its_type(cls, given: Any) -> Any:
        """Take the other names of `http`, and take the type from `url` or `command` if absent."""
        if not isinstance(given, Mapping):
            return given
        kind = given.get("type") or ("http" if given.get("url") else "stdio")
        return {**given, "type": "http" if kind in HTTP_NAMES else kind}

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> "McpServer":
        needed, other = ("url", "command") if self.has_address else ("command", "url")
        if not getattr(self, needed) or getattr(self, other):
            raise ValueError(f"a server of type {self.type} has a `{needed}` and no `{other}`")
        if self.in_sandbox and not self.has_address:
            raise ValueError("remove `in_sandbox`: a `command` always runs in the sandbox")
        return self

    @field_validator("url")
    @classmethod
    def _is_public(cls, url: str) -> str:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError unless it is a number up to 65535
        if url and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("write http://HOST/PATH or https://HOST/PATH")
        if parts.username or parts.password:
            raise ValueError("requests are stored: move the credentials to a header, as ${NAME}")
        return url

    @field_validator("headers")
    @classmethod
    def _have_no_secrets(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not _HEADER_NAME.fullmatch(name) or not value.isprintable():
                raise ValueError(f"{name!r} is not a header")
            if "${" in VARIABLE.sub("", value):
                raise ValueError(f"write the variable of {name} as ${{NAME}}, without a default")
            if SECRET_HEADER.search(name) and not VARIABLE.search(value):
                raise ValueError(f"requests are stored: write the secret of {name} as ${{NAME}}")
        return headers

    @field_validator("env")
    @classmethod
    def _has_no_secrets(cls, env: dict[str, str]) -> dict[str, str]:
        if secret := next(filter(SECRET_VARIABLE.search, env), None):
            raise ValueError(f"requests are stored, and a sandbox gets no secrets: remove {secret}")
        return env

    @property
    def has_address(self) -> bool:
        """Whether it has a `url`, and not a `command`."""
        return self.type != "stdio"

    @property
    def is_behind_gateway(self) -> bool:
        """Whether agents reach it through the gateway."""
        return self.has_address and not self.in_sandbox

    @property
    def variables(self) -> tuple[str, ...]:
        """The gateway's variables that its headers need."""
        names = (name for value in self.headers.values() for name in VARIABLE.findall(value))
        return tuple(dict.fromkeys(f"MCP_{name}" for name in names))

    def filled(self, values: Mapping[str, str]) -> dict[str, str]:
        """Its headers with the values of `variables`."""
        return {
            name: VARIABLE.sub(lambda found: values[f"MCP_{found[1]}"], value)
            for name, value in self.headers.items()
        }


McpServers = Annotated[dict[McpName, McpServer], Field(max_length=MOST_SERVERS)]
"""Name -> server."""
