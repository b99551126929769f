"""Reads the file of `--mcp`: MCP servers in the form of Claude Code's `.mcp.json`."""

import json
from pathlib import Path

from pydantic import BaseModel, Field, JsonValue, ValidationError

from perdure.errors import ConfigurationError
from perdure.types import McpServers
from perdure.types.validation_errors import faults


class _McpFile(BaseModel):
    servers: McpServers = Field(alias="mcpServers")


def read(path: Path) -> dict[str, JsonValue]:
    """`mcp_servers` of a rollout. Raises: ConfigurationError naming the file and the field."""
    try:
        found = _McpFile.model_validate(json.loads(path.read_text()))
    except ValidationError as error:
        raise ConfigurationError(f"--mcp {path}: {faults(error)}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--mcp {path}: {error}") from error
    return {name: one.model_dump(exclude_defaults=True) for name, one in found.servers.items()}
