"""An agent that is one command, and a home whose catalog has one row for it."""

from pathlib import Path
from typing import ClassVar

from perdure.agents.base import AgentTask, Evidence, Launch
from perdure.instances import catalog
from perdure.instances.sources import pack
from perdure.rollouts.services import Services
from perdure.settings.tree import AgentSettings, Settings
from perdure.storage.base import put_blob
from perdure.types import AgentEnd, Grading, Instance, Source, SourceKind

ROW = "toy/add-1"


class CommandAgent:
    argv: ClassVar[tuple[str, ...]]
    needs_model: ClassVar[bool] = False
    artifacts: ClassVar[tuple[str, ...]] = ()

    async def install(self, tools: Path, settings: AgentSettings) -> tuple[()]:
        return ()

    def launch(self, task: AgentTask) -> Launch:
        return Launch(argv=self.argv)

    def classify(self, evidence: Evidence) -> AgentEnd:
        return AgentEnd.FINISHED if evidence.status.ok else AgentEnd.CRASHED


async def services_with_row(settings: Settings, tree: Path, file: str) -> Services:
    """The row's tree has this one file, and any diff passes its tests."""
    services = Services(settings)
    tree.mkdir()
    (tree / file).write_text("a\n")
    row = Instance(
        instance_id="add-1",
        dataset="toy",
        problem_statement="add",
        source=Source(kind=SourceKind.BLOB, key=await put_blob(services.store, pack(tree))),
        grading=Grading(protocol="eval_cmd", eval_cmd="true"),
    )
    await catalog.save(services.store, row)
    return services
