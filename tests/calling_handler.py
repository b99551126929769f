"""A handler with document 003's signatures, whose own agent calls the model once and then fixes the file."""

from collections.abc import Mapping
from typing import Any

import httpx

from perdure.data_source_handlers import AgentHandler, JobDetails, LLMConfig
from perdure.sandboxes.base import Sandbox
from perdure.types import Instance

NAME = f"{__name__}:Calls"
"""The `data_source` of its rows: no registration is needed."""


class Calls(AgentHandler):
    name = "calls"

    async def init(
        self,
        instance: Instance,
        llm_config: LLMConfig | None = None,
        sid: str | None = None,
        max_iterations: int = 1,
    ) -> tuple[Any, Any, Any]:
        return self.sandbox, {"sid": sid, "iterations": max_iterations}, llm_config

    async def run(
        self, runtime: Sandbox, metadata: dict[str, Any], config: LLMConfig, instance: Instance
    ) -> Mapping[str, Any]:
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": instance.problem_statement}],
        }
        headers = {"authorization": f"Bearer {config.api_key}"}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            url = f"{config.base_url}/chat/completions"
            answer = await client.post(url, json=body, headers=headers)
        await runtime.exec("sed -i s/-/+/ calc.py", cwd=runtime.workdir, check=True)
        return {"status": answer.status_code, "iterations": metadata["iterations"]}

    async def eval(
        self, job_details: JobDetails, sid: str | None = None, allow_skip: bool = True
    ) -> Mapping[str, Any]:
        results = job_details.run_results
        assert sid == f"eval_{job_details.job_id}"
        assert job_details.metadata == {"sid": job_details.job_id, "iterations": 7}
        assert (results["status"], results["iterations"]) == (200, 7)
        return {"report": {"resolved": b"+    return a + b" in results["git_patch"]}}
