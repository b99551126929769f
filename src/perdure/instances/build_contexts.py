"""Build contexts: the folder of a Dockerfile, kept in the store as one archive under its digest."""

import asyncio
import json
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TypeVar

from perdure.errors import InstanceError
from perdure.instances import base_trees
from perdure.sandboxes.image_builds import DOCKERFILE, image_name_of
from perdure.storage.base import Store, put_blob
from perdure.types import Build, Environment, Instance, Sidecar

Container = TypeVar("Container", Environment, Sidecar)

FILES = ".perdure-files"
"""Folder of a build context for the files of a sidecar."""
MOST_MB = 256
"""Largest build context: each host that builds it reads it into memory."""


async def store_contexts(store: Store, instance: Instance) -> Instance:
    """Store the instance's build contexts and name its images by their digests.

    Raises: InstanceError if a context is too large or cannot be read.
    """
    own = await _store_context(store, instance.ref, instance.environment)
    grading, verifier = instance.grading, instance.grading.verifier
    if verifier is not None:
        tests = await _store_context(store, instance.ref, verifier.environment)
        verifier = verifier.model_copy(update={"environment": tests})
        grading = grading.model_copy(update={"verifier": verifier})
    return instance.model_copy(update={"environment": own, "grading": grading})


async def _store_context(store: Store, ref: str, environment: Environment) -> Environment:
    sidecars = {
        name: await _store_sidecar(store, ref, one) for name, one in environment.sidecars.items()
    }
    own = await _with_stored_build(store, ref, environment)
    return own.model_copy(update={"sidecars": sidecars})


async def _store_sidecar(store: Store, ref: str, sidecar: Sidecar) -> Sidecar:
    """Files of the task become part of the sidecar's image, so that it runs on any host."""
    if not sidecar.files:
        return await _with_stored_build(store, ref, sidecar)
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
        context = Path(folder) / "context"
        try:
            await asyncio.to_thread(_write_context, sidecar, context)
        except (OSError, shutil.Error) as error:
            raise InstanceError(f"{ref}: a sidecar's files cannot be read: {error}") from error
        timeout_s = sidecar.build.timeout_s if sidecar.build else Build().timeout_s
        build = Build(path=str(context), timeout_s=timeout_s)
        made = sidecar.model_copy(update={"build": build, "files": {}})
        return await _with_stored_build(store, ref, made)


def _write_context(sidecar: Sidecar, context: Path) -> None:
    """A build of the sidecar's image with its files. A folder replaces the image's, as a mount does."""
    lines = [f"FROM {sidecar.image}"]
    if sidecar.build is not None and sidecar.build.path is not None:
        shutil.copytree(sidecar.build.path, context, symlinks=True)
        lines = [(context / DOCKERFILE).read_text()]
    (context / FILES).mkdir(parents=True)
    with (context / ".dockerignore").open("a") as file:
        file.write(f"\n!{FILES}\n")
    for at, (target, source) in enumerate(sorted(sidecar.files.items())):
        place = context / FILES / str(at)
        if Path(source).is_dir():
            shutil.copytree(source, place, symlinks=True)
            lines += [
                f"RUN rm -rf -- {shlex.quote(target)} || true",
                f"COPY {json.dumps([f'{FILES}/{at}/', f'{target}/'])}",
            ]
        else:
            shutil.copy(source, place)
            lines.append(f"COPY {json.dumps([f'{FILES}/{at}', target])}")
    (context / DOCKERFILE).write_text("\n".join([*lines, ""]))


async def _with_stored_build(store: Store, ref: str, container: Container) -> Container:
    build = container.build
    if build is None or build.path is None:
        return container
    packed = await asyncio.to_thread(_pack_context, ref, Path(build.path), build.dockerfile)
    key = await put_blob(store, packed)
    made = build.model_copy(update={"path": None, "key": key, "dockerfile": ""})
    image = image_name_of(key.rpartition("/")[2])
    return container.model_copy(update={"build": made, "image": image})


def _pack_context(ref: str, folder: Path, dockerfile: str) -> bytes:
    """`dockerfile`: as `Build.dockerfile`. It copies the whole folder, so `.dockerignore` excludes it."""
    try:
        size = sum(path.lstat().st_size for path in folder.rglob("*"))
        if size > MOST_MB << 20:
            raise InstanceError(
                f"{ref}: the build context {folder} has {size >> 20} MB, and at most {MOST_MB} are "
                "allowed: let the Dockerfile fetch large files, or move them out of the folder"
            )
        if not dockerfile:
            return base_trees.pack(folder)
        with tempfile.TemporaryDirectory() as parent:
            made = shutil.copytree(folder, Path(parent, "context"), symlinks=True)
            (made / DOCKERFILE).write_text(dockerfile)
            (made / ".dockerignore").write_text(f"{DOCKERFILE}\n.dockerignore\n")
            return base_trees.pack(made)
    except OSError as error:
        raise InstanceError(f"{ref}: the build context {folder} cannot be read: {error}") from error
