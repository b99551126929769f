"""Names of provider accounts: providers that share caps share a name, and it contains no secret."""

from pathlib import Path

import pytest

from perdure.sandboxes.providers.daytona.provider import DaytonaProvider
from perdure.sandboxes.providers.e2b.provider import E2BProvider
from perdure.sandboxes.providers.modal.provider import ModalProvider
from perdure.settings.settings_tree import Settings


@pytest.mark.parametrize(
    ("provider", "variable"),
    [
        (E2BProvider, "E2B_API_KEY"),
        (DaytonaProvider, "DAYTONA_API_KEY"),
        (ModalProvider, "MODAL_TOKEN_ID"),
    ],
)
def test_each_key_is_an_account(
    provider: type[E2BProvider | DaytonaProvider | ModalProvider],
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Each key has its own queue, and the account's name does not show the key."""
    names = []
    for key in ("key-one", "key-two", "key-one"):
        monkeypatch.setenv(variable, key)
        names.append(provider(Settings(home=tmp_path)).account)

    assert names[0] == names[2] != names[1]
    assert "key" not in "".join(names)
