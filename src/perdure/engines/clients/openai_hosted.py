"""A hosted OpenAI-compatible API. It has no token ids, so its turns say `trainable: false`.

The client passes on the agent's request with the rollout's sampling, our key, our token limit, and the
model name of the settings or the rollout. It sends none of the agent's headers.
"""

from typing import Any

from perdure.dialects import openai_chat
from perdure.engines.base import ChatAnswer
from perdure.engines.clients.hosted_requests import HostedApi
from perdure.engines.hosted_sampling import is_openai_api


class OpenAIHosted(HostedApi):
    kind = "openai"

    def _headers_of(self, api_key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def chat(self, request: dict[str, Any], *, session_id: str) -> ChatAnswer:
        body = {**request, "model": self.model or request["model"], "stream": False}
        body.pop("stream_options", None)
        # OpenAI's newer models refuse the old name; other servers know only the old name.
        body["max_completion_tokens" if is_openai_api(self._root) else "max_tokens"] = body.pop(
            "max_tokens"
        )
        return await self._post("/chat/completions", body, _checked, session_id=session_id)


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    choice = answer["choices"][0]
    choice["message"] = openai_chat.messages([choice["message"]])[0]
    return answer
