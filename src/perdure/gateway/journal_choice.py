"""Which journal the settings ask for."""

from pathlib import Path

from perdure.gateway.base import Journal
from perdure.gateway.journal import LocalJournal
from perdure.gateway.journal_mirror import MirroredJournal
from perdure.gateway.journal_parts import Parts
from perdure.gateway.journal_store import StoreJournal
from perdure.settings import Settings
from perdure.storage.base import Store


def folder(settings: Settings) -> Path:
    return settings.home.absolute() / "journal"


def open_journal(settings: Settings, store: Store) -> Journal:
    """Call it inside an event loop.

    A store that is a folder is as lost as this host's disk: nothing is copied into it.
    """
    local, parts = LocalJournal(folder(settings)), Parts(store)
    if settings.gateway_durability == "store":
        return StoreJournal(parts, MirroredJournal(local, parts).adopt)
    return local if store.url.startswith("file:") else MirroredJournal(local, parts)
