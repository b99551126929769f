"""The toy instances in the store of every stack."""

from pathlib import Path

from perdure.instances import instance_catalog
from perdure.storage.base import Store
from perdure.types import (
    Grading,
    Instance,
    Source,
    SourceKind,
)
from tests.stack.gated_engine import LEAVE_IT

GOLD = b"""\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TASK = "add(2, 3) returns -1."
INSTANCE = "tests/add"
SLOW_INSTANCE = "tests/add-slowly"
"""Its hidden test takes a few seconds: long enough to be met at work."""
UNSOLVED_INSTANCE = "tests/add-wrongly"
"""The agent's fix does not pass its hidden test."""
IDLE_INSTANCE = "tests/leave-it"
"""The agent changes nothing."""
CHECK = "python3 -c 'from calc import add; assert add(2, 3) == {}'"


async def add_instances(home: Path, store: Store) -> None:
    tree = home / "trees" / "calc"
    tree.mkdir(parents=True, exist_ok=True)
    (tree / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    await _save(store, tree, INSTANCE, CHECK.format(5))
    await _save(store, tree, SLOW_INSTANCE, f"sleep 4; {CHECK.format(5)}")
    await _save(store, tree, UNSOLVED_INSTANCE, CHECK.format(6))
    await _save(store, tree, IDLE_INSTANCE, CHECK.format(5), LEAVE_IT)


async def _save(store: Store, tree: Path, ref: str, command: str, task: str = TASK) -> None:
    dataset, _, name = ref.partition("/")
    instance = Instance(
        instance_id=name,
        dataset=dataset,
        problem_statement=task,
        source=Source(kind=SourceKind.DIRECTORY, path=str(tree)),
        grading=Grading(protocol="eval_cmd", eval_cmd=command, timeout_s=60),
        gold_patch=GOLD,
    )
    await instance_catalog.save(store, instance)
