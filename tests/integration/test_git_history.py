"""A commit of a clone becomes a row whose lists come from running its tests in sandboxes."""

import os
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from perdure.graders.gold_and_base_check import calibrate
from perdure.instances import base_trees, host_git
from perdure.instances.recipes import git_history
from perdure.instances.recipes.dataset_recipe import History
from perdure.sandboxes.base import Sandbox, SandboxSpec
from perdure.sandboxes.providers.local import LocalProvider
from perdure.settings.settings_tree import Settings
from perdure.storage.local_store import LocalStore

TEST = "from thing import f\n\n\ndef test_kept():\n    assert f(0) == 0\n"
MORE = "\n\ndef test_fixed():\n    assert f(1) == 2\n"


@pytest.mark.longer
async def test_lists_of_a_commit_come_from_its_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test that the commit fixes is to fix, the one that passes before and after is to keep."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    clone, store = tmp_path / "thing", LocalStore(tmp_path / "store")
    clone.mkdir()
    host_git.start(clone)
    for code, test in (("x", TEST), ("2 * x", TEST + MORE)):
        (clone / "thing.py").write_text(f"def f(x):\n    return {code}\n")
        (clone / "test_thing.py").write_text(test)
        host_git.add_commit(clone, "f doubles\n")
    (row,) = git_history.candidates(History(repository=str(clone)), Path())
    instance = await row.make("mine", store)
    tree = tmp_path / "tree"
    await base_trees.fetch(instance.source, tree, store)
    host_git.commit_all(tree)
    provider = LocalProvider(Settings(home=tmp_path / "home", sandbox={"allow_local": True}))

    async def make(purpose: str) -> Sandbox:
        path = f"{sys.prefix}/bin:{os.defpath}"
        alone = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        spec = SandboxSpec(workdir="/testbed", tree=tree, env={"PATH": path, **alone})
        return await provider.create(spec, f"p-{purpose}-{uuid4().hex[:8]}")

    grading = (await calibrate(instance, make, runs=1, twins=0)).instance.grading

    assert grading.fail_to_pass == ("test_thing.py::test_fixed",)
    assert grading.pass_to_pass == ("test_thing.py::test_kept",)
