"""A home whose catalog has one row."""

from pathlib import Path
from typing import Any

from perdure.instances import instance_catalog
from perdure.instances.base_trees import pack
from perdure.rollouts.stage_services import Services
from perdure.storage.base import put_blob
from perdure.types import Grading, Instance, Source, SourceKind

ROW = "toy/add-1"


async def save_row(services: Services, tree: Path, file: str = "a.txt", **fields: Any) -> None:
    """The row's tree has this one file, with the line `one`. Unless `fields` say otherwise, any diff
    passes its tests."""
    tree.mkdir()
    (tree / file).write_text("one\n")
    known = {
        "instance_id": "add-1",
        "dataset": "toy",
        "problem_statement": "add",
        "source": Source(kind=SourceKind.BLOB, key=await put_blob(services.store, pack(tree))),
        "grading": Grading(protocol="eval_cmd", eval_cmd="true"),
    }
    await instance_catalog.save(services.store, Instance.model_validate(known | fields))
