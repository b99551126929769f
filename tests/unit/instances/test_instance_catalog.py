"""Instances load as they were saved; a wrong name lists similar ones."""

from pathlib import Path

import pytest

from perdure.errors import ConfigurationError, NotFound
from perdure.instances import instance_catalog
from perdure.storage.local_store import LocalStore
from perdure.types import Grading, Instance, Source, SourceKind

INSTANCE = Instance(
    instance_id="click-8.1.3",
    dataset="first-steps",
    problem_statement="Fix it.",
    source=Source(kind=SourceKind.IMAGE),
    gold_patch=b"+a\r\n",
    grading=Grading(test_patch=b"+caf\xe9\r\n", fail_to_pass=("tests/t.py::a[x y]",)),
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


async def test_what_is_saved_is_loaded(store: LocalStore) -> None:
    """An instance survives the store byte for byte, with CRLF and bytes that are not UTF-8."""
    await instance_catalog.save(store, INSTANCE)

    assert await instance_catalog.load(store, "first-steps/click-8.1.3") == INSTANCE


async def test_refs_are_the_datasets_own(store: LocalStore) -> None:
    """A dataset lists its own instances in order, and no other dataset's."""
    for dataset, instance_id in [("d", "b"), ("d", "a"), ("d2", "c")]:
        changed = {"dataset": dataset, "instance_id": instance_id}
        await instance_catalog.save(store, INSTANCE.model_copy(update=changed))

    assert await instance_catalog.refs(store, "d") == ["d/a", "d/b"]


async def test_misspelt_instance_names_the_right_one(store: LocalStore) -> None:
    """The error suggests the similar name and the command that adds instances."""
    await instance_catalog.save(store, INSTANCE)

    with pytest.raises(
        NotFound, match=r"'first-steps/clik-8\.1\.3'.*first-steps/click-8\.1\.3.*perdure"
    ):
        await instance_catalog.load(store, "first-steps/clik-8.1.3")


async def test_unknown_dataset_names_the_known_ones(store: LocalStore) -> None:
    """The error for an unknown dataset lists the known ones."""
    await instance_catalog.save(store, INSTANCE)

    with pytest.raises(NotFound, match=r"no dataset 'other' \(first-steps\)"):
        await instance_catalog.load(store, "other/x")


async def test_reference_of_another_form_is_refused(store: LocalStore) -> None:
    """The error for a bare instance id shows the form of a reference."""
    with pytest.raises(ConfigurationError, match="<dataset>/<instance_id>"):
        await instance_catalog.load(store, "click-8.1.3")
