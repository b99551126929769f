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
SERVED_MODEL = click.option(
    "--served-model",
    metavar="NAME",
    help="Model name in requests; runs choose it with --model NAME.  [default: the model of the settings]",
)
TOKENIZER = click.option(
    "--tokenizer",
    metavar="T",
    help="Tokenizer of a model that is added for the first time: qwen3, or a folder.",
)
TOOL_CALL_PARSER = click.option(
    "--tool-call-parser",
    default="auto",
    metavar="P",
    show_default=True,
    help="Format of that model's tool calls.",
)
WEIGHT = click.option(
    "--weight",
    type=click.FloatRange(0, min_open=True),
    default=1.0,
    metavar="W",
    show_default=True,
    help="Share of new sessions, relative to other engines.",
)
