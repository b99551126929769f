"""One chat completion of a model of the engines, through the gateway, in a session of its own.

The gateway journals each answer, so a repeated call gets it without a second completion.
"""

from typing import Any

from perdure.errors import Boundary, GatewayUnavailable, RetryHere
from perdure.gateway.control_client import FailoverTransport
from perdure.rollouts.reward_model.bounded_post import Answered, parse_object, post_json
from perdure.rollouts.stage_services import Services

NOT_OPEN = 403

Messages = list[dict[str, str]]


class Reply:
    """One chat completion. Raises: RetryHere if it is none."""

    def __init__(self, document: Any) -> None:
        try:
            choice = document["choices"][0]
            self.text = str(choice["message"].get("content") or "")
            self.is_cut = choice.get("finish_reason") == "length"
            self.id = str(document.get("id") or "")
            self.model = str(document.get("model") or "")
            self._usage = dict(document.get("usage") or {})
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            problem = f"the gateway gave no completion: {error!r}"
            raise RetryHere(problem, boundary=Boundary.GATEWAY) from error

    def count(self, name: str) -> int:
        return int(self._usage.get(name) or 0)

    @property
    def cached(self) -> int:
        details = self._usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


async def post_chat(
    services: Services, session: str, model: str, messages: Messages, *, timeout_s: float
) -> Answered:
    """The gateway's answer, whatever its status. A retry of a call in flight joins it.

    Raises: RetryHere; GatewayUnavailable if another try has ended the session.
    """
    answer = await post_json(
        f"{(await services.gateways.urls())[0]}/v1/chat/completions",
        {"model": model, "messages": messages},
        headers={
            "authorization": f"Bearer {services.gateway.key(session)}",
            "idempotency-key": f"{session}-{len(messages)}",
        },
        timeout_s=timeout_s,
        transport=FailoverTransport(services.gateways),
    )
    if answer.status == NOT_OPEN:
        raise GatewayUnavailable(f"the session {session} is not open")
    return answer


def parse_reply(answer: Answered, who: str) -> Reply:
    """Raises: RetryHere."""
    return Reply(parse_object(answer.body, who))
