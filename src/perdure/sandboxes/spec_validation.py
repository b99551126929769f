"""What every provider checks before it makes a sandbox or starts a command.

All raise ConfigurationError with the fix in the message.
"""

import os
import re
from collections.abc import Mapping, Sequence

from perdure.errors import ConfigurationError
from perdure.sandboxes.base import SandboxProvider, SandboxSpec
from perdure.types import Sidecar

IDENTITY = re.compile(r"[a-z0-9-]{1,63}")
EXEC_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
LARGEST_ARGUMENT = 128 * 1024 - 1
"""Bytes; the kernel's MAX_ARG_STRLEN."""


def check_identity(identity: str) -> None:
    if not IDENTITY.fullmatch(identity):
        raise ConfigurationError(
            f"identity {identity!r} must be 1 to 63 lower-case letters, digits or '-'"
        )


def check_exec_id(exec_id: str) -> None:
    if not EXEC_ID.fullmatch(exec_id):
        raise ConfigurationError(
            f"exec_id {exec_id!r} must be 1 to 128 letters, digits, '.', '_' or '-'"
        )


def check_argv(argv: Sequence[str]) -> None:
    if not argv:
        raise ConfigurationError("argv is empty; name a program")
    for argument in argv:
        if "\0" in argument:
            raise ConfigurationError("argv contains a NUL byte; put the data into a file")
        if len(os.fsencode(argument)) > LARGEST_ARGUMENT:
            raise ConfigurationError(
                f"argv has an argument of more than {LARGEST_ARGUMENT} bytes; put it into a file"
            )


def check_variables(env: Mapping[str, str]) -> None:
    for name, value in env.items():
        if not (name.isascii() and name.isidentifier()) or "\0" in value:
            raise ConfigurationError(
                f"env {name!r}: a variable's name must be letters, digits and '_', and its value "
                "must not contain a NUL byte"
            )


def check_sidecars(
    provider: SandboxProvider, sidecars: Mapping[str, Sidecar], who: str = "the spec has"
) -> None:
    """`who`: the beginning of the message."""
    if sidecars and (why := provider.sidecars_refusal(sidecars)):
        raise ConfigurationError(
            f"{who} the sidecars {', '.join(sorted(sidecars))}, which {provider.name} cannot run: "
            f"{why}"
        )


def check_folders(spec: SandboxSpec) -> None:
    """The workdir, the mounts and the tree, for providers that bind or overlay host folders."""
    for target in (spec.workdir, *(mount.target for mount in spec.mounts)):
        if not target.startswith("/") or target == "/":
            raise ConfigurationError(f"{target!r} must be an absolute path below /")
    for mount in spec.mounts:
        if not mount.source.is_absolute() or not mount.source.exists():
            raise ConfigurationError(
                f"mount source {str(mount.source)!r} must be an absolute path that exists"
            )
    if spec.tree is not None and not spec.tree.is_dir():
        raise ConfigurationError(f"tree {str(spec.tree)!r} is not a folder")
    if spec.tree is not None and (
        set(str(spec.tree)) & set(',:\\"') or not spec.tree.is_absolute()
    ):
        raise ConfigurationError(
            f"tree {str(spec.tree)!r} must be absolute, without comma, colon, quote or backslash"
        )
