"""Filling a new store: which rows of a parameter are read at once, and how much memory that takes."""

from collections.abc import Callable, Iterable

from fuyou.layout.record import Record
from fuyou.layout.record_parts import ParameterSlot

SPAN_ELEMENTS = 4 << 20  # Elements that are read at once, unless a single row (an expert) has more
# Upper bound of the bytes that one of these takes: its value, at most fp32, and half a row more where a checkpoint has
# experts in two parts.
BYTES_PER_ELEMENT = 6


def row_spans(slot: ParameterSlot) -> list[tuple[int, int]]:
    """Return the ranges in which the rows of a record's parameter are read, counted in the whole parameter."""
    start = 0 if slot.experts is None else slot.experts[0]
    rows = slot.shape[0]
    step = max(1, SPAN_ELEMENTS // max(1, slot.numel // rows))
    return [(start + first, start + min(first + step, rows)) for first in range(0, rows, step)]


def filling_bytes(records: Iterable[Record]) -> int:
    """Return the most bytes of values that are in memory while a store is filled, from a source that reads rows."""
    return BYTES_PER_ELEMENT * max(
        min(slot.numel, max(SPAN_ELEMENTS, slot.numel // slot.shape[0]))
        for record in records
        for slot in record.parameters
        if slot.shape
    )


def whole_elements(records: Iterable[Record], reads_rows: Callable[[str], bool]) -> int:
    """Return the most elements of parameters that a source has to read as a whole, of those that are in memory at once:
    where some of their experts are in one record and some in the next, these stay until the last.

    Args:
        records: the model's.
        reads_rows: whether the source reads rows of the parameter of this name.
    """
    most = 0
    for record in records:
        whole = [slot for slot in record.parameters if not reads_rows(slot.names[0]) and slot.compressed is None]
        cut = sum(slot.numel // slot.shape[0] * slot.all_experts for slot in whole if slot.experts is not None)
        most = max(most, cut + max((slot.numel for slot in whole if slot.experts is None), default=0))
    return most
