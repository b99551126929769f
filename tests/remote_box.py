"""A bubblewrap sandbox that plays one elsewhere, so that tests need no service.

Named by its dotted path, `tests.remote_box:RemoteBox`. It has no network, and gets no socket.
"""

from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider

NAME = "tests.remote_box:RemoteBox"


class RemoteBox(BubblewrapProvider):
    """Keeps bubblewrap's name, so that its sandboxes are where a test looks for leftovers."""

    host_bound = False
