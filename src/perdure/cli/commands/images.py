"""`perdure images`: pull or build a dataset's images before a run, and remove unused ones."""

import asyncio
from typing import TYPE_CHECKING, Any

import click

from perdure.cli import signal_cleanup
from perdure.cli.commands import completion
from perdure.cli.console import answer, json_option, many, print_when_silent, say
from perdure.settings.settings_loader import load_settings

if TYPE_CHECKING:
    from perdure.instances.image_preparation import PreparedImage
    from perdure.settings.settings_tree import Settings

DAY_S = 86_400.0


@click.group()
def images() -> None:
    """Prepare a dataset's images before a run; remove unused ones."""


@images.command()
@click.argument("source", metavar="SOURCE", shell_complete=completion.datasets)
@click.option(
    "-i", "--include", multiple=True, metavar="GLOB", help="Only instance ids that match."
)
@click.option(
    "-x", "--exclude", multiple=True, metavar="GLOB", help="Skip instance ids that match."
)
@click.option("-l", "--limit", type=click.IntRange(1), metavar="N", help="At most N instances.")
@click.option("--sandbox", default="podman", metavar="S", show_default=True,
              shell_complete=completion.sandboxes,
              help="Sandbox provider whose images to prepare.")  # fmt: skip
@click.option("-j", "--jobs", type=click.IntRange(1), default=4, metavar="N", show_default=True,
              help="Images at a time.")  # fmt: skip
@click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE",
              help="Set a field of a rollout, e.g. phases.environment.network=host.")  # fmt: skip
@json_option
def prepare(*, source: str, jobs: int, as_json: bool, **given: Any) -> None:
    """Pull or build every image that a run of SOURCE needs.

    Podman and docker keep images on this host. A service builds Dockerfiles in its account, and pulls
    other images by itself.

    Prints each image once it is ready. Images that are here are skipped, so repeat the command to
    continue after Ctrl-C or a failure. Exit code 1: an image is missing.
    """
    settings = load_settings()
    found = signal_cleanup.run(_prepare(settings, source, jobs, given))
    if as_json:
        from dataclasses import asdict

        answer([asdict(one) for one in found])
    failed = [one for one in found if one.problem]
    total = sum(one.size for one in found) >> 20
    say(f"{len(found) - len(failed)} of {many(len(found), 'image')} here, {total:,} MB")
    if failed:
        raise click.exceptions.Exit(1)


async def _prepare(
    settings: "Settings", source: str, jobs: int, given: dict[str, Any]
) -> "list[PreparedImage]":
    """Raises: ConfigurationError, MissingDependency."""
    from perdure.cli.runs import instance_selection
    from perdure.cli.runs.run_request import RunOptions, check, fields_of
    from perdure.data_source_handlers import import_handlers
    from perdure.errors import ConfigurationError
    from perdure.instances import image_plan, image_preparation, instance_catalog
    from perdure.instances.environment_builder import Environments, check_image
    from perdure.instances.rows.row_choice import Choice
    from perdure.sandboxes.image_builds import ImageBuilder
    from perdure.stack.home_providers import ready_provider
    from perdure.storage.store_url import open_store

    import_handlers(settings.handlers)
    fields = fields_of(given["assignments"], {"sandbox": given["sandbox"]})
    rollout = check(RunOptions(source, "nop", fields=fields))
    provider, store = ready_provider(settings, rollout.sandbox), open_store(settings)
    if not isinstance(provider, ImageBuilder):
        raise ConfigurationError(
            f"--sandbox {rollout.sandbox} builds no images that can be prepared: use podman, docker, "
            "modal, e2b or daytona"
        )
    choice = Choice(given["include"], given["exclude"], given["limit"], True)
    selection = await instance_selection.resolve(store, source, choice)
    for note in selection.notes:
        say(note)
    refs = selection.refs
    if refs is None:
        every = await instance_catalog.refs(store, selection.dataset)
        refs = tuple(instance_selection.chosen(every, choice.include, choice.exclude))
    instances = [await instance_catalog.load(store, ref) for ref in refs[: choice.limit]]
    for instance in instances:
        check_image(instance, provider)
    environments = Environments(
        settings.home.absolute() / "environments",
        store,
        provider,
        build_hosts=settings.sandbox.build_hosts,
    )
    found = []
    planned = await image_plan.plan_images(
        instances,
        provider,
        rollout,
        store,
        bounds=image_plan.BEFORE_START,
        mirror=settings.sandbox.image_mirror,
    )
    for line in planned.lines():
        say(line)
    with print_when_silent("preparing images"):
        async for one in image_preparation.prepare_all(
            instances,
            environments,
            provider,
            rollout,
            jobs=jobs,
        ):
            found.append(one)
            say(f"  {_image_line(one)}")
    return found


def _image_line(one: "PreparedImage") -> str:
    if one.problem:
        return f"{one.image}: failed: {one.problem}"
    took = "" if one.done == "here" else f" in {one.seconds:.0f} s"
    return f"{one.image}: {one.done}{took}, {one.size >> 20:,} MB ({one.instance})"


@images.command()
@click.option("--days", type=click.FloatRange(0), default=30.0, metavar="N", show_default=True,
              help="Keep images that a rollout used in the last N days.")  # fmt: skip
@json_option
def prune(days: float, as_json: bool) -> None:
    """Remove built images that no rollout uses any more.

    A later run builds them again. Those of E2B and Daytona are deleted from the account, even if other
    hosts use them. Pulled images stay: podman and docker have their own `image prune`.
    """
    settings = load_settings()
    removed = asyncio.run(_prune(settings, days))
    if as_json:
        answer(removed)
    for image in removed:
        say(f"  {image}")
    say(f"{many(len(removed), 'image')} removed")


async def _prune(settings: "Settings", days: float) -> list[str]:
    from perdure.instances import image_preparation
    from perdure.sandboxes.image_builds import ImageBuilder
    from perdure.stack.home_providers import provider

    named = (provider(settings, name) for name in ("podman", "docker", "e2b", "daytona"))
    ready = [one for one in named if isinstance(one, ImageBuilder) and not one.check()]
    return await image_preparation.prune(settings.home.absolute(), ready, unused_s=days * DAY_S)
