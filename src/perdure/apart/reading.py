"""Calls a function on bytes from a sandbox, in a child process with limits."""

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from perdure.apart.children import Children, Overrun
from perdure.errors import PerdureError

P = ParamSpec("P")
T = TypeVar("T")
READERS = Children(limited=True)
_log = logging.getLogger(__name__)


class Unparsable(Exception):
    """What the sandbox wrote cannot be read within the limits. This is a verdict on it: reading it
    again would end the same."""


async def read(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(*args)`, in a child. Its own PerdureErrors and Unparsable pass through.

    Raises: Unparsable; RetryHere when the host gives a child no time; ConfigurationError.
    """
    assert not kwargs, "a request has positional arguments only"
    try:
        answer = await READERS.call(function, args)
    except Overrun as error:
        raise Unparsable(f"reading it: {error}") from None
    found = answer.found
    if answer.is_value:
        return cast(T, found)
    if isinstance(found, (PerdureError, Unparsable)):
        raise found
    _log.error("a sandbox's output broke its reader", exc_info=found)
    raise Unparsable(f"reading it failed: {type(found).__name__}: {str(found)[:200]}") from found
