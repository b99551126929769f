"""`perdure codec-server`: lets the web UI and the `temporal` command show encrypted payloads."""

import asyncio

import click

from perdure.cli.console import say
from perdure.errors import ConfigurationError, MissingDependency
from perdure.installation import command_for_extra
from perdure.settings.settings_loader import load_settings
from perdure.settings.settings_tree import Settings

PORT = 8234


@click.command("codec-server")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=PORT, show_default=True, help="Port; 0 = any free port.")
def codec_server(host: str, port: int) -> None:
    """Decrypt payloads for the web UI and `temporal`, until Ctrl-C.

    Prints the address to paste into the UI's "Codec Server" dialog. The server refuses pages from
    other origins and requests without the token in that address.
    """
    asyncio.run(_serve(load_settings(), host, port))


async def _serve(settings: Settings, host: str, port: int) -> None:
    """Raises: ConfigurationError, MissingDependency."""
    if settings.temporal.codec_keys_file is None:
        raise ConfigurationError(
            "payloads are not encrypted here: PERDURE_TEMPORAL__CODEC_KEYS_FILE is not set"
        )
    try:
        from perdure.stack.codec_server import codec_token, create_app, origin_of
        from perdure.stack.command_server import serving
    except ImportError as error:
        raise MissingDependency(
            "this command needs packages that are not installed: install them with "
            f"`{command_for_extra('gateway')}`"
        ) from error
    from perdure.client.payload_encryption import EncryptingCodec, Keys
    from perdure.home_folder import load_secret

    codec = EncryptingCodec(Keys(settings.temporal.codec_keys_file.absolute()))
    token = codec_token(load_secret(settings))
    ui = _ui_url(settings)
    try:
        async with serving(create_app(codec, token, [origin_of(ui)]), host, port) as chosen:
            name = f"[{host}]" if ":" in host else host
            say(f"Codec server for the web UI at {ui}: http://{name}:{chosen}/{token}")
            say(
                f"Options for temporal: --codec-endpoint http://{name}:{chosen} --codec-auth 'Bearer {token}'"
            )
            await asyncio.Event().wait()
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def _ui_url(settings: Settings) -> str:
    from perdure.client.temporal_server import configured_address
    from perdure.stack import stack_lifecycle

    state = stack_lifecycle.running(settings)
    if settings.temporal.ui_url:
        return settings.temporal.ui_url
    if configured_address(settings) is None:
        return state.ui_url if state else f"http://127.0.0.1:{settings.temporal.ui_port}"
    raise ConfigurationError(
        "set PERDURE_TEMPORAL__UI_URL: the codec server answers only pages of that web UI"
    )
