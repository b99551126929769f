"""A hosted API whose account has a quota of calls until a time that its refusals name, or no credit."""

import json
import math
import time
from collections import Counter
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.stack.gated_engine import HeldEngine


class QuotaEngine(HeldEngine):
    """Sells `quota` calls, then answers 429 with Retry-After until `resets_at`, Unix seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.quota: float = math.inf
        self.resets_at = 0.0
        self.sold: Counter[int] = Counter()
        """Calls answered, by the number of the turn."""
        self.no_credit: tuple[int, dict[str, Any]] | None = None
        """Status and body with which it refuses every call."""
        self.refused = 0
        """How often it did so."""

    async def _chat(self, request: Request) -> Response:
        if self.no_credit is not None:
            self.refused += 1
            return JSONResponse(self.no_credit[1], self.no_credit[0])
        body = json.loads(await request.body())
        left = self.resets_at - time.time()
        if self.sold.total() >= self.quota and left > 0:
            error = {"error": {"message": "You have hit your daily limit", "code": "rate_limit"}}
            return JSONResponse(error, 429, {"retry-after": str(math.ceil(left))})
        self.sold[sum(one["role"] == "assistant" for one in body["messages"])] += 1
        return await super()._chat(request)


def hours(opens_in_h: int) -> str:
    """Open for four hours, beginning at the full hour before `opens_in_h` hours have passed."""
    begin = int(time.time() // 3600) + opens_in_h
    return f"{begin % 24:02}:00-{(begin + 4) % 24:02}:00"
