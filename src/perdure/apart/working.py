"""Calls a function on our own data, in a child process: it neither holds up the event loop nor grows a
process that lives long."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from perdure.apart.children import Children, Overrun
from perdure.errors import Boundary, RetryHere

P = ParamSpec("P")
T = TypeVar("T")
WORKERS = Children(limited=False)


async def work(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args)`, in a child without limits. What it raises is raised here.

    Raises: RetryHere when the host has no room or no time for it; ConfigurationError.
    """
    assert not kwargs, "a request has positional arguments only"
    try:
        answer = await WORKERS.call(function, args)
    except Overrun as error:
        raise RetryHere(str(error), boundary=Boundary.WORKER) from None
    if answer.is_value:
        return cast(T, answer.found)
    raise answer.found
