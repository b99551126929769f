"""The viewer as an ASGI application, with the routes of its pages."""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from perdure.errors import NotFound, PerdureError
from perdure.viewer.pages import Pages
from perdure.viewer.viewer_security import Guard

STATIC = {"view.css": "text/css", "view.js": "text/javascript"}


def create_app(pages: Pages, token: str) -> ASGIApp:
    """The read-only application. Every route except static files shows a page."""
    group = "/runs/{run}/rollouts/{instance}"
    rollout = f"{group}/{{sample:int}}"
    routes = [
        Route("/", pages.runs),
        Route("/search", pages.search),
        Route("/runs/{run}", pages.run),
        Route(group, pages.group),
        Route(rollout, pages.rollout),
        Route(f"{rollout}/tokens", pages.tokens),
        Route(f"{rollout}/patch", pages.patch),
        Route(f"{rollout}/tests", pages.tests),
        Route(f"{rollout}/files", pages.files),
        Route(f"{rollout}/beside/{{other:int}}", pages.beside),
        *(Route(f"/static/{name}", _static(name, kind)) for name, kind in STATIC.items()),
    ]

    async def failed(request: Request, error: Exception) -> Response:
        return pages.problem(str(error), 404 if isinstance(error, NotFound) else 503)

    async def unknown(request: Request, error: Exception) -> Response:
        return pages.problem("page not found", 404)

    return Guard(
        Starlette(routes=routes, exception_handlers={PerdureError: failed, 404: unknown}), token
    )


def _static(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    data = files("perdure.viewer").joinpath("static", name).read_bytes()

    async def answer(request: Request) -> Response:
        return Response(data, media_type=kind)

    return answer
