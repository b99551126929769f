"""An engine's server on a Ray node: it passes each call on to the engine of the test's process.

When its node dies, the calls that it carries are cut.
"""

import argparse

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

HOPS = {b"host", b"connection", b"content-length", b"transfer-encoding"}
"""Headers of one connection, not of the call."""


class Relay:
    def __init__(self, engine: str, generation: int) -> None:
        self._client = httpx.AsyncClient(base_url=engine, timeout=None)
        self._generation = generation

    def app(self) -> Starlette:
        every = Route("/{path:path}", self._carry, methods=["GET", "POST"])
        return Starlette(routes=[Route("/v1/models", self._models), every])

    async def _carry(self, request: Request) -> Response:
        call = self._client.build_request(
            request.method,
            request.url.path,
            headers=[pair for pair in request.headers.raw if pair[0] not in HOPS],
            content=await request.body(),
        )
        answer = await self._client.send(call, stream=True)
        return StreamingResponse(
            answer.aiter_raw(),
            answer.status_code,
            {k: v for k, v in answer.headers.items() if k.encode() not in HOPS},
            background=BackgroundTask(answer.aclose),
        )

    async def _models(self, request: Request) -> Response:
        """The engine's list, with the name of this start, by which gateways tell starts apart."""
        answer = await self._client.get("/v1/models")
        return Response(
            answer.text.replace('"policy"', f'"policy-g{self._generation}"', 1),
            answer.status_code,
            media_type="application/json",
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True, help="URL of the engine that samples")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--generation", type=int, required=True)
    options = parser.parse_args()
    app = Relay(options.engine, options.generation).app()
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
