"""A bubblewrap sandbox that passes for one elsewhere, so that tests need no service for it.

Named by its dotted path, `tests.remote_box:RemoteBox`. It has no network, and gets no socket.
"""

from perdure.sandboxes.providers.bubblewrap import BubblewrapProvider

NAME = "tests.remote_box:RemoteBox"


class RemoteBox(BubblewrapProvider):
    """Keeps bubblewrap's name: its sandboxes lie where a test looks for what is left."""

    host_bound = False
