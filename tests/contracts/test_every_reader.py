"""No bytes from a sandbox break a reader, and its CPU time grows linearly with their length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.graders.reports.log_parsers import LogParser, published_names
from perdure.limited_process import Unparsable, read
from tests.contracts.hostile_output import (
    PIECES,
    SHAPES,
    Reader,
    cpu_of,
    grown,
    readers,
    tried,
)

READERS = readers()
FIXED = [(b"", piece, b"") for piece in PIECES] + [
    (b"", b"a::", b" PASSED"),
    (b"diff --git a/", b"x b/", b"\n"),
    (b"<?xml version='1.0' encoding='utf-8'?>", b"<a>", b""),
    (b"<?xml version='1.0' encoding='utf-8'?><a>", b"<testcase classname='a' name='t'/>", b"</a>"),
    (b"_ ", b".py:", b" _"),
    (b"PASSED t[", b" ", b"x"),
]


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@settings(max_examples=30, deadline=None)
@given(
    st.one_of(st.lists(st.sampled_from(PIECES), max_size=20).map(b"".join), st.binary(max_size=200))
)
def test_no_bytes_break_a_reader(reader: Reader, data: bytes) -> None:
    """For any bytes, a reader returns a result or raises a named refusal."""
    tried(reader, data)


def _grows_linearly(reader: Reader, shape: tuple[bytes, bytes, bytes], size: int) -> None:
    """Measures three times, because CPU time varies on a busy host. Quadratic time always fails."""
    small, large = grown(shape, size), grown(shape, 4 * size)
    costs = []
    for _ in range(3):
        costs.append((cpu_of(reader, small), cpu_of(reader, large)))
        if costs[-1][1] <= 5 * costs[-1][0] + 0.05:
            return

    raise AssertionError(f"{shape} of {size} bytes, and four times as many: {costs} s")


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_four_times_the_bytes_cost_at_most_some_five_times(reader: Reader) -> None:
    """Known shapes of hostile input, such as one line of `a::`, take time in proportion."""
    for shape in FIXED:
        _grows_linearly(reader, shape, 8 << 10)


@pytest.mark.longer
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
@settings(max_examples=15, deadline=None)
@given(shape=SHAPES)
def test_no_shape_costs_more_than_its_length(
    reader: Reader, shape: tuple[bytes, bytes, bytes]
) -> None:
    """The same for larger inputs of random shapes."""
    _grows_linearly(reader, shape, 32 << 10)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=20).map(b"".join))
def test_no_bytes_break_a_published_parser(data: bytes) -> None:
    """swebench's parsers also return statuses or raise a named refusal."""
    for name in published_names():
        tried(LogParser(name).statuses, data)


@pytest.mark.longer
async def test_a_log_that_a_parser_reads_for_ever_is_a_verdict() -> None:
    """django's expression takes quadratic time on this log, so the reader ends at its CPU limit."""
    log = b"a ... Testing against Django installed in \n" * 60_000
    with pytest.raises(Unparsable, match="CPU time"):
        await read(LogParser("parse_log_django").statuses, log)
