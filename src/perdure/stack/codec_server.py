"""Temporal's codec server: decrypts payloads for the web UI and the `temporal` command.

The web UI sends `POST <endpoint>/decode` from the browser; the `temporal` command also sends
`/encode`. A request needs the token, and one from a browser must come from the UI's origin. The codec
and this home's keys are in `perdure.client.payload_encryption`.
"""

import hashlib
import hmac
from urllib.parse import urlsplit

from google.protobuf import json_format
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from temporalio.api.common.v1 import Payloads
from temporalio.converter import PayloadCodec

from perdure.errors import PerdureError

MAX_BODY = 16 << 20
HEADERS = ("authorization", "content-type", "x-namespace")
"""Headers that the web UI sends."""


def codec_token(secret: bytes) -> str:
    """The access token of a home's codec server. It is derived, so links survive restarts."""
    return hmac.new(secret, b"codec server", hashlib.sha256).hexdigest()


def origin_of(ui_url: str) -> str:
    """The origin that a browser sends from the UI's pages."""
    found = urlsplit(ui_url)
    return f"{found.scheme}://{found.netloc}"


def create_app(codec: PayloadCodec, token: str, ui_origins: list[str]) -> Starlette:
    """The token comes as a bearer token, or in the path, because the UI can send it nowhere else."""

    async def convert(request: Request) -> Response:
        origin = request.headers.get("origin")
        if origin is not None and origin not in ui_origins:
            return _refused(403, f"pages from {origin} are not allowed")
        if not _allowed(request, token):
            return _refused(401, "the token is missing or wrong")
        body = await _body(request)
        if body is None:
            return _refused(413, f"a request may have at most {MAX_BODY} bytes")
        try:
            payloads = json_format.Parse(body, Payloads()).payloads
        except (json_format.ParseError, UnicodeDecodeError):
            return _refused(400, "the body is not JSON with payloads")
        change = codec.encode if request.url.path.endswith("/encode") else codec.decode
        try:
            changed = Payloads(payloads=await change(list(payloads)))
        except PerdureError as error:
            return _refused(422, str(error))
        return Response(json_format.MessageToJson(changed), media_type="application/json")

    paths = ("/encode", "/decode", "/{token}/encode", "/{token}/decode")
    return Starlette(
        routes=[Route(path, convert, methods=["POST"]) for path in paths],
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=ui_origins,
                allow_methods=["POST"],
                allow_headers=HEADERS,
                allow_credentials=True,  # the UI can be configured to send cookies
            )
        ],
    )


def _allowed(request: Request, token: str) -> bool:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    given = [request.path_params.get("token", ""), bearer.strip() if scheme == "Bearer" else ""]
    return any(hmac.compare_digest(one.encode(), token.encode()) for one in given)


async def _body(request: Request) -> bytes | None:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            return None
    return body


def _refused(status: int, message: str) -> Response:
    return JSONResponse({"message": message}, status_code=status)
