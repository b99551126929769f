"""A model class for mini-swe-agent (its `model_class` setting): one POST per turn, without litellm.

It runs in the sandbox, in the agent's own environment; no module of Perdure imports it.
"""

# mypy: ignore-errors

import os

import requests
from minisweagent.models.openrouter_model import OpenRouterModel
from minisweagent.models.utils.actions_toolcall import BASH_TOOL

REFUSED = {400, 401, 403, 404, 422}


class ContextWindowExceededError(Exception):
    """Has litellm's name, because the agent's exit status is the name of the exception."""


class RequestRefused(Exception):
    """The gateway refused the request and would refuse a retry."""


class DirectModel(OpenRouterModel):
    """Sends chat completions with the bash tool, as the litellm class does."""

    abort_exceptions = (ContextWindowExceededError, RequestRefused, KeyboardInterrupt)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        settings = dict(self.config.model_kwargs)
        self._url = settings.pop("api_base") + "/chat/completions"
        self._timeout = settings.pop("timeout")
        settings.pop("drop_params", None)
        self._settings = settings
        self._session = requests.Session()
        self._session.trust_env = False
        self._session.headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"
        self._session.headers.update(settings.pop("extra_headers"))

    def _query(self, messages, **kwargs):
        body = {"model": self.config.model_name, "messages": messages, "tools": [BASH_TOOL]}
        answer = self._session.post(
            self._url, json={**body, **self._settings, **kwargs}, timeout=self._timeout
        )
        if answer.status_code in REFUSED:
            too_long = "context_length_exceeded" in answer.text
            raise (ContextWindowExceededError if too_long else RequestRefused)(answer.text)
        answer.raise_for_status()
        return answer.json()
