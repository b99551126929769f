"""Rows that several threads read at once."""

import gc
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from perdure.errors import InstanceError
from perdure.instances.rows.row_fields import Row

WIDE = repr([f"tests/test_a.py::test_b[{number}]" for number in range(400)])
DEEP = "[" * 60 + "'a'" + "]" * 60


class Slow:
    """Garbage whose collection lets another thread run, in the middle of whatever collects it."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        time.sleep(0)


@pytest.fixture
def busy_collector() -> Iterator[None]:
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*threshold)


def test_lists_in_pythons_form_are_read_by_many_threads(busy_collector: None) -> None:
    """CPython's parser ends with SystemError if a thread enters it while another is inside."""
    failed: list[Exception] = []

    def read(text: str) -> None:
        for _ in range(60):
            made = [Slow() for _ in range(20)]
            del made
            try:
                Row(1, {"tests": text}).strings("tests")
            except InstanceError:
                pass  # `DEEP` is no list of strings
            except Exception as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=read, args=(text,)) for text in (WIDE, DEEP) * 6]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == []
