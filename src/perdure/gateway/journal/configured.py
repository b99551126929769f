"""Which journal the settings ask for, and where the turns in flight lie beside it."""

from pathlib import Path

from perdure.gateway.journal.base import Journal
from perdure.gateway.journal.local import LocalJournal
from perdure.gateway.journal.mirror import MirroredJournal
from perdure.gateway.journal.partial_stores import LocalShelf, StoreShelf
from perdure.gateway.journal.partials import Partials
from perdure.gateway.journal.parts import Parts
from perdure.gateway.journal.store import StoreJournal
from perdure.settings.tree import Settings
from perdure.storage.base import Store


def folder(settings: Settings) -> Path:
    return settings.home.absolute() / "journal"


def open_journal(settings: Settings, store: Store) -> Journal:
    """Call it inside an event loop.

    A store that is a folder is as lost as this host's disk: nothing is copied into it.
    """
    local, parts = LocalJournal(folder(settings)), Parts(store)
    if settings.gateway.durability == "store":
        return StoreJournal(parts, MirroredJournal(local, parts).adopt)
    return local if store.url.startswith("file:") else MirroredJournal(local, parts)


def open_partials(settings: Settings, store: Store) -> Partials:
    in_store = settings.gateway.durability == "store"
    return Partials(StoreShelf(store) if in_store else LocalShelf(folder(settings)))
