"""Serves episode files, and no other object, to trainers that have no credentials for the store.

GET /episodes/{key}     `episode.json`, `episode.parquet` or a `turns.parquet` of a rollout
"""

import re

from starlette.requests import Request
from starlette.responses import Response

from perdure.dialects.base import Refused
from perdure.gateway.http.api_keys import may_read_episodes

FILES = re.compile(
    r"runs/[^/]+/rollouts/[^/]+/\d+/(?:episode\.(?:json|parquet)|attempts/\d+/turns\.parquet)"
)


async def read_file(request: Request) -> Response:
    """Raises: Refused (401, 404), NotFound, StoreUnavailable."""
    gateway, key = request.app.state.gateway, request.path_params["key"]
    if not may_read_episodes(gateway.secrets, request.headers):
        raise Refused(401, "invalid_episodes_token", "the episodes token is missing or wrong")
    if not FILES.fullmatch(key):
        raise Refused(404, "not_found", f"{key[:200]!r} is not a file of an episode")
    found = await gateway.store.get(key)
    return Response(found.data, media_type="application/octet-stream")
