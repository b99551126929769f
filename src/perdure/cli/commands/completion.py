"""Shell completion: the script that a shell sources, and the names it offers.

Names come from the registry and from folders, so Tab imports no SDK and opens no connection.
"""

from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from perdure.errors import ConfigurationError

HOW = {
    "bash": 'add to ~/.bashrc: eval "$(perdure completion bash)"',
    "zsh": 'add to ~/.zshrc: eval "$(perdure completion zsh)"',
    "fish": "perdure completion fish > ~/.config/fish/completions/perdure.fish",
}


@click.command()
@click.argument("shell", type=click.Choice(list(HOW)))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash   eval "$(perdure completion bash)"      in ~/.bashrc
    zsh    eval "$(perdure completion zsh)"       in ~/.zshrc
    fish   perdure completion fish > ~/.config/fish/completions/perdure.fish
    """
    from perdure.cli.main import cli

    found = get_completion_class(shell)
    assert found is not None, shell
    click.echo(found(cli, {}, "perdure", "_PERDURE_COMPLETE").source())


def agents(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from perdure.variant_registry import AGENTS

    return _starting(AGENTS, incomplete)


def sandboxes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from perdure.variant_registry import SANDBOXES

    return _starting(SANDBOXES, incomplete)


def runs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _starting(_folders("runs"), incomplete)


def datasets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Datasets of a local store; files if there are none."""
    found = _starting(_folders("instances"), incomplete)
    return found or [CompletionItem(incomplete, type="file")]


def runs_and_datasets(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [*runs(ctx, param, incomplete), *datasets(ctx, param, incomplete)]


def _folders(kind: str) -> list[str]:
    """Names in a local store. Returns none for a remote store or after an error."""
    from perdure.settings.settings_loader import load_settings

    try:
        root = Path(load_settings().store_url.removeprefix("file://"))
        return sorted(entry.name for entry in (root / kind).iterdir())
    except (OSError, ConfigurationError):
        return []


def _starting(names: "list[str] | dict[str, str]", incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]
