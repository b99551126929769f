"""The `perdure` command: the table of its commands, and the one place that sets exit codes.

It imports only click until it knows the command, so that `--help` is fast. Exit code 2: the command
line, a setting or the data is wrong; 1: something failed; 130: Ctrl-C.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click
from click.shell_completion import CompletionItem

from perdure.settings import process_environment

COMMANDS = {
    "run": ("perdure.cli.commands.run:run", "Run an agent on instances, or join the run again."),
    "eval": (
        "perdure.cli.commands.eval:evaluate",
        "Like run, with an estimate before it and a report after it.",
    ),
    "swebench": (
        "perdure.cli.commands.swebench:swebench",
        "Like eval, with the options of `mini-extra swebench`.",
    ),
    "sweep": (
        "perdure.cli.commands.sweep:sweep",
        "Run each combination of agents, models and fields.",
    ),
    "status": (
        "perdure.cli.commands.status:status",
        "Show the stack and its runs, or one run's rollouts.",
    ),
    "watch": ("perdure.cli.commands.watch:watch", "Follow a run live."),
    "show": (
        "perdure.cli.commands.show:show",
        "Show one rollout: stages, attempts, grade, patch, turns.",
    ),
    "pause": ("perdure.cli.commands.pause_resume_cancel:pause", "Start no more rollouts of a run."),
    "resume": ("perdure.cli.commands.pause_resume_cancel:resume", "Continue a paused run."),
    "resize": (
        "perdure.cli.commands.pause_resume_cancel:resize",
        "Change how many rollouts are in flight.",
    ),
    "cancel": (
        "perdure.cli.commands.pause_resume_cancel:cancel",
        "Cancel a run or one rollout; its files are kept.",
    ),
    "retry": (
        "perdure.cli.commands.retry:retry",
        "Run a run's failed or chosen rollouts again.",
    ),
    "regrade": (
        "perdure.cli.commands.retry:regrade",
        "Grade a run's patches again, without the agent.",
    ),
    "grade": (
        "perdure.cli.commands.grade:grade",
        "Grade patches that another program made.",
    ),
    "adopt": (
        "perdure.cli.commands.adopt:adopt",
        "Complete the results of Harbor, Inspect, mini-swe-agent or SWE-bench.",
    ),
    "report": (
        "perdure.cli.commands.report:report",
        "Report and compare the results of runs: text, JSON, HTML.",
    ),
    "view": (
        "perdure.cli.commands.view:view",
        "Browse runs and read trajectories on a local page.",
    ),
    "export": (
        "perdure.cli.commands.export:export",
        "Write a run's episodes for trainers and graders.",
    ),
    "runs": ("perdure.cli.commands.runs:runs", "Name, tag, archive and delete runs."),
    "instances": (
        "perdure.cli.commands.instances:instances",
        "Build, import, list and show instances.",
    ),
    "images": (
        "perdure.cli.commands.images:images",
        "Pull or build a dataset's images before a run; remove unused ones.",
    ),
    "agents": (
        "perdure.cli.commands.agents:agents",
        "Check that an agent's real program works; change its version.",
    ),
    "sandboxes": (
        "perdure.cli.commands.sandboxes:sandboxes",
        "Prove a sandbox provider on your own account.",
    ),
    "accounts": (
        "perdure.cli.commands.accounts:accounts",
        "List accounts at their quota; open them early.",
    ),
    "engines": (
        "perdure.cli.commands.engines.engine_commands:engines",
        "Start engines on Ray; list, add, drain, remove.",
    ),
    "workers": (
        "perdure.cli.commands.workers:workers",
        "Run one worker per node on Ray or Slurm.",
    ),
    "up": (
        "perdure.cli.commands.up_and_down:up",
        "Start Temporal, the gateway and the workers here.",
    ),
    "down": ("perdure.cli.commands.up_and_down:down", "Stop everything that `up` started."),
    "doctor": (
        "perdure.cli.commands.doctor:doctor",
        "Check this machine: what works, what is missing.",
    ),
    "codec-server": (
        "perdure.cli.commands.codec_server:codec_server",
        "Decrypt payloads for Temporal's web UI.",
    ),
    "settings": (
        "perdure.cli.commands.settings:settings",
        "List all settings with value and origin.",
    ),
    "demo": ("perdure.cli.commands.demo:demo", "Run three agents on real instances."),
    "completion": (
        "perdure.cli.commands.completion:completion",
        "Print shell completion for bash, zsh or fish.",
    ),
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [
            CompletionItem(name, help=text)
            for name, (_, text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"there is no command {args[0]!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="perdure", message="perdure %(version)s")
def cli() -> None:
    """Durable SWE coding-agent rollouts: graded, token-exact training episodes.

    \b
    Start with    perdure demo
    or            perdure instances build
                  perdure run first-steps --agent oracle
    """


def main() -> NoReturn:
    """The console script."""
    code = invoke(sys.argv[1:])
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = code or 1
    if "perdure.tracing" in sys.modules:
        from perdure import tracing

        tracing.flush()
    if {"temporalio", "boto3"} & sys.modules.keys():
        # The SDK's native threads can crash Python during shutdown, and threads that wait for an S3
        # server would keep the process alive.
        if (limited_process := sys.modules.get("perdure.limited_process")) is not None:
            limited_process.end_all()  # os._exit skips its atexit handler
        os._exit(code)
    sys.exit(code)


def invoke(args: Sequence[str]) -> int:
    """Run one command line and return its exit code. Raises only with PERDURE_DEBUG=1."""
    try:
        code = cli.main(list(args), prog_name="perdure", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.UsageError as error:
        return _usage(error, args)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). Python's flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if process_environment.debug():
            raise
        from perdure.stack import error_lines

        code, line = error_lines.explain(error)
        return _fail(code, line, args)


def _usage(error: click.UsageError, args: Sequence[str]) -> int:
    where = error.ctx.command_path if error.ctx else "perdure"
    message = error.format_message()
    message = message[:1].lower() + message[1:].rstrip(".")
    return _fail(2, f"{message} (see `{where} --help`)", args)


def _fail(code: int, line: str, args: Sequence[str]) -> int:
    click.echo(f"error: {line}", err=True)
    if "--json" in args:
        click.echo(json.dumps({"error": line}))
    return code


if __name__ == "__main__":
    main()
