"""The journal's promise: what was appended survives, what was torn is cut, damage is never guessed."""

from pathlib import Path

import pytest

from perdure.errors import ConfigurationError
from perdure.gateway.journal import FILE_NAME, Journal, JournalDamaged


@pytest.fixture
def journal(tmp_path: Path) -> "Journal":
    return Journal(tmp_path)


def _file(journal_folder: Path) -> Path:
    return journal_folder / "s" / FILE_NAME


async def test_records_come_back_in_order(tmp_path: Path, journal: Journal) -> None:
    """Records of one session are read in the order in which they were appended."""
    for number in range(5):
        await journal.append("s", {"number": number, "text": "a\nb\u00e9\ud800"})

    assert [record["number"] for record in journal.read("s")] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("lost", [1, 7, 30])
async def test_a_torn_tail_is_cut(tmp_path: Path, journal: Journal, lost: int) -> None:
    """A record cut short at any byte is as if it was never written, and appending goes on."""
    await journal.append("s", {"number": 0})
    await journal.append("s", {"number": 1, "text": "x" * 40})
    data = _file(tmp_path).read_bytes()
    _file(tmp_path).write_bytes(data[:-lost])

    before = journal.read("s")
    await journal.append("s", {"number": 2})

    assert before == [{"number": 0}]
    assert journal.read("s") == [{"number": 0}, {"number": 2}]


async def test_a_tail_of_zeros_is_cut(tmp_path: Path, journal: Journal) -> None:
    """Blocks that a power cut left unwritten are a torn tail too."""
    await journal.append("s", {"number": 0})
    with _file(tmp_path).open("ab") as file:
        file.write(b"\0" * 100)

    assert journal.read("s") == [{"number": 0}]


async def test_damage_before_the_tail_is_an_error(tmp_path: Path, journal: Journal) -> None:
    """A flipped byte in an answered turn is reported, and the file is left as it is."""
    await journal.append("s", {"number": 0})
    await journal.append("s", {"number": 1})
    data = bytearray(_file(tmp_path).read_bytes())
    data[data.index(b"number")] ^= 1
    _file(tmp_path).write_bytes(data)

    with pytest.raises(JournalDamaged, match="damaged"):
        journal.read("s")
    assert _file(tmp_path).read_bytes() == data


async def test_a_full_disk_leaves_no_half_record(tmp_path: Path, journal: Journal) -> None:
    """An append that fails raises, and the next one is readable."""
    await journal.append("s", {"number": 0})
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the session's folder should be")

    with pytest.raises(OSError):  # noqa: PT011  the number differs between file systems
        await journal.append("blocked", {"number": 1})
    await journal.append("s", {"number": 2})

    assert journal.read("s") == [{"number": 0}, {"number": 2}]


def test_two_gateways_never_share_a_journal(tmp_path: Path, journal: Journal) -> None:
    """A second process on one home is told so instead of writing into the same files."""
    with pytest.raises(ConfigurationError, match="another gateway"):
        Journal(tmp_path)

    journal.close()
    Journal(tmp_path).close()
