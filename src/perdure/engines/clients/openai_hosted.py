"""A hosted OpenAI-compatible API: no token ids, so its turns say `trainable: false`.

The agent's request is passed on unchanged, except for the model name (that of the settings or of the
rollout, never the agent's), our key and our token cap. None of the agent's headers are sent.
"""

from typing import Any
from urllib.parse import urlsplit

import httpx

from perdure.dialects import openai_chat
from perdure.engines.clients.wire import PATIENCE_S, Wire, engine_name


class OpenAIHosted:
    """`base_url` with or without `/v1`."""

    def __init__(
        self,
        base_url: str,
        model: str,
        client: httpx.AsyncClient,
        *,
        api_key: str,
        key_source: str,
        patience_s: float = PATIENCE_S,
    ) -> None:
        root = base_url.rstrip("/")
        if not urlsplit(root).path:
            root += "/v1"
        self._url = f"{root}/chat/completions"
        self._model = model
        # OpenAI's own newer models refuse the old name; other servers know only the old one.
        own = (urlsplit(root).hostname or "").endswith("openai.com")
        self._cap_name = "max_completion_tokens" if own else "max_tokens"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        name = engine_name("openai", base_url)
        self._wire = Wire(name, client, headers, key_source=key_source, patience_s=patience_s)
        self.name = self._wire.name

    async def chat(self, request: dict[str, Any], *, session_id: str) -> dict[str, Any]:
        body = {**request, "model": self._model or request["model"], "stream": False}
        body.pop("stream_options", None)
        body[self._cap_name] = body.pop("max_tokens")
        return await self._wire.post(self._url, body, _checked)


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    choice = answer["choices"][0]
    choice["message"] = openai_chat.messages([choice["message"]])[0]
    return answer
