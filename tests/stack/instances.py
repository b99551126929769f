"""The toy instances in the store of every stack."""

from pathlib import Path

from perdure.instances import catalog
from perdure.storage.base import Store
from perdure.types import (
    Grading,
    Instance,
    Source,
    SourceKind,
)

GOLD = b"""\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
INSTANCE = "tests/add"
SLOW_INSTANCE = "tests/add-slowly"
"""Its hidden test takes a few seconds: long enough to be met at work."""


async def add_instances(home: Path, store: Store) -> None:
    tree = home / "trees" / "calc"
    tree.mkdir(parents=True, exist_ok=True)
    (tree / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    check = "python3 -c 'from calc import add; assert add(2, 3) == 5'"
    for ref, command in ((INSTANCE, check), (SLOW_INSTANCE, f"sleep 4; {check}")):
        dataset, _, name = ref.partition("/")
        instance = Instance(
            instance_id=name,
            dataset=dataset,
            problem_statement="add(2, 3) returns -1.",
            source=Source(kind=SourceKind.DIRECTORY, path=str(tree)),
            grading=Grading(protocol="eval_cmd", eval_cmd=command, timeout_s=60),
            gold_patch=GOLD,
        )
        await catalog.save(store, instance)
