"""`perdure view`: serves a local page to browse runs and read trajectories."""

import asyncio

import click

from perdure.cli.commands import completion
from perdure.cli.console import say
from perdure.errors import ConfigurationError, MissingDependency
from perdure.installation import command_for_extra
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings

PORT = 8236
STEP_S = 2.0
"""How long a page of an open rollout waits for Temporal's answer."""


@click.command()
@click.argument(
    "where", metavar="[RUN[/INSTANCE[/SAMPLE]]]", default="", shell_complete=completion.runs
)
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True,
              help="0 = any free port.")  # fmt: skip
def view(where: str, port: int) -> None:
    """Browse runs, groups and rollouts in a browser, until Ctrl-C.

    Prints the address with an access token. The server listens on this machine only and changes
    nothing. To open it from another machine: `ssh -L 8236:127.0.0.1:8236 HOST`.
    """
    asyncio.run(_serve(load_settings(), where.removeprefix("rollout/").strip("/"), port))


async def _serve(settings: Settings, where: str, port: int) -> None:
    """Raises: ConfigurationError, MissingDependency."""
    try:
        from perdure.stack.command_server import serving
        from perdure.viewer import page_links
        from perdure.viewer.pages import Pages
        from perdure.viewer.search_index import Index, index_path
        from perdure.viewer.viewer_app import create_app
        from perdure.viewer.viewer_security import TOKEN, view_token
    except ImportError as error:
        raise MissingDependency(
            "this command needs packages that are not installed: install them with "
            f"`{command_for_extra('gateway')}`"
        ) from error
    from perdure.cli.rollouts.current_activity import current_step
    from perdure.home_folder import load_secret
    from perdure.storage.store_url import store_to_read

    async def step(workflow_id: str) -> str:
        try:
            async with asyncio.timeout(STEP_S):
                return await current_step(settings, workflow_id)
        except TimeoutError:
            return ""

    store = store_to_read(settings)
    token = view_token(load_secret(settings))
    pages = Pages(settings, store, Index(index_path(settings.home, store.url)), step)
    try:
        async with serving(create_app(pages, token), "127.0.0.1", port) as chosen:
            page = page_links.named(where)
            say(f"Showing {store.url} at http://127.0.0.1:{chosen}{page}?{TOKEN}={token}")
            await asyncio.Event().wait()
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on 127.0.0.1:{port}: {error.strerror}; give another --port"
        ) from error
    finally:
        await pages.aclose()
