"""Installs an npm package with its dependencies in the tool cache, with a pinned npm on Perdure's Node.

It runs no install scripts. `npm_packages` installs single tarballs, without npm.
"""

import json
import re
from pathlib import Path

from perdure.agents import npm_packages, tool_cache
from perdure.settings.settings_tree import AgentSettings

EXACT = re.compile(r"(@[\w.-]+/)?[\w.-]+@\d+\.\d+\.\d+[\w.+-]*")
"""A package with an exact version, such as `@scope/name@1.2.3`."""
QUIET = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier")


async def installed(tools: Path, settings: AgentSettings, package: str) -> Path:
    """The folder with `node_modules` of this exact version, with the newest dependencies it allows.

    Raises: AgentError when the registry does not deliver it.
    """
    npm = await _npm(tools, settings)
    command = (*npm, "install", *QUIET, "--no-package-lock", package)
    return await tool_cache.built(
        tools, "npm_package", package, lambda folder: _run(command, folder, {"private": True})
    )


async def installed_from_lock(tools: Path, settings: AgentSettings, lock: str) -> Path:
    """The folder with `node_modules` of exactly the packages in `locks/npm_trees/<lock>.json`, without
    optional ones.

    Raises: AgentError when the registry does not deliver one, or its hash is not the lock's.
    """
    npm = await _npm(tools, settings)
    content = (npm_packages.LOCKS / "npm_trees" / f"{lock}.json").read_text()
    command = (*npm, "ci", *QUIET, "--omit=optional", "--legacy-peer-deps")

    def build(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "package-lock.json").write_text(content)
        _run(command, folder, json.loads(content)["packages"][""])

    return await tool_cache.built(tools, lock, content, build)


async def _npm(tools: Path, settings: AgentSettings) -> tuple[str, ...]:
    node = await npm_packages.installed(tools, "node", settings.node_tarball)
    npm = await npm_packages.installed(tools, "npm", settings.npm_tarball)
    return (f"{node}/bin/node", f"{npm}/bin/npm-cli.js")


def _run(command: tuple[str, ...], folder: Path, manifest: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text(json.dumps(manifest))
    tool_cache.run_installer([*command, "--prefix", str(folder)])
