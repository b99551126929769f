"""Arguments and options that several `perdure engines` commands take."""

import click


def _name(_context: click.Context, _argument: click.Parameter, text: str) -> str:
    """Returns `host:port` from `host:port` or from the URL that `add` took."""
    from perdure.engines.engine_state import name_of

    try:
        return name_of(text) if "://" in text else text
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


NAME = click.argument("name", metavar="HOST:PORT", callback=_name)
ADDRESS = click.option(
    "--ray-address",
    default="",
    metavar="HOST:PORT",
    help="Ray cluster.  [default: RAY_ADDRESS, or a cluster on this machine]",
)
WEIGHT = click.option(
    "--weight",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    metavar="W",
    show_default=True,
    help="Share of new sessions, relative to other engines.",
)
