"""Sizes, counts and times, read and written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UserError
from common.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(("text", "count"), [
    ("24GiB", 24 << 30),
    ("512 MB", 512_000_000),
    ("1.5g", 1_500_000_000),
    (" .5 KiB ", 512),
    ("1tib", 1 << 40),
    ("0", 0),
    ("4096b", 4096),
    ("9007199254740991", 2**53 - 1),
    (7, 7),
])  # fmt: skip
def test_reads_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-1GiB", "1e9", "1,5G", "24 G i B", "4GiB extra"])
def test_rejects_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="is not a size"):
        parse_bytes(text)


@given(st.integers(0, 2**55))
def test_what_is_written_reads_back_to_three_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count).replace(",", "")) == pytest.approx(count, rel=0.005, abs=0.5)


@pytest.mark.parametrize(("count", "text"), [
    (0, "0 B"),
    (1023, "1023 B"),
    (1024, "1 KiB"),
    (1536 << 20, "1.5 GiB"),
    (1000 << 20, "1000 MiB"),
    (1 << 40, "1 TiB"),
])  # fmt: skip
def test_writes_sizes(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.85, "850 ms"), (12.34, "12.3 s"), (245, "4 min 05 s"), (12_000, "3 h 20 min"), (187_200, "2 d 4 h")],
)
def test_writes_times(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
