"""The handler and the quick start of document 003 as they are printed there, and two handlers that fail."""

QUICK_START = """\
from openhands.nvidia.async_server import OpenHandsServer

server = OpenHandsServer(
    llm_server_addresses=["http://localhost:8000/v1"],
    max_init_workers=4,
    max_run_workers=4,
)
server.start()

result = server.process(instance, sampling_params)
print(result)

server.stop()
"""

DOCUMENT = """\
from openhands.nvidia.registry import AgentHandler, register_agent_handler

class MyAgentHandler(AgentHandler):
    @property
    def name(self) -> str:
        return "my_agent"

    async def init(self, instance, llm_config=None, sid=None, max_iterations=1):
        # prepare runtime, metadata, config
        return runtime, metadata, config

    async def run(self, runtime, metadata, config, instance):
        # execute agent logic
        return {"git_patch": "...", "messages": [...]}  # shape is agent-specific

    async def eval(self, job_details, sid=None, allow_skip=True):
        # evaluate run_results against the instance
        return {"score": 1.0}

register_agent_handler(MyAgentHandler())
"""

NAMES = "runtime = metadata = config = None\n"
"""What the document's `init` leaves to the reader."""

FAILING = """

class Broken(AgentHandler):
    name = "broken"

    async def init(self, instance, llm_config=None, sid=None, max_iterations=1):
        return {"runtime": self.sandbox}

    async def eval(self, job_details, sid=None, allow_skip=True):
        return {"score": 1.0}


class Raises(Broken):
    name = "raises"

    async def init(self, instance, llm_config=None, sid=None, max_iterations=1):
        raise KeyError("image")


register_agent_handler(Broken())
register_agent_handler(Raises())
"""


def module() -> str:
    """All of them, with only the document's import path changed."""
    return (
        NAMES
        + DOCUMENT.replace("openhands.nvidia.registry", "perdure.data_source_handlers")
        + FAILING
    )


def quick_start() -> str:
    """With only the document's import path changed."""
    return QUICK_START.replace("openhands.nvidia.async_server", "perdure.integrations.openhands")
