"""Parse and format sizes, counts, and times; merge time intervals."""

import re

from common.errors import UserError

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(text: str | int) -> int:
    """Return the bytes in ``"24GiB"``, ``"512 MB"``, ``"1.5g"`` or a plain number; any other text is a UserError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].lower() not in _FACTORS:
        raise UserError(f"{text!r} is not a size. Write 24GiB, 512MiB, 80GB or a number of bytes.")
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def format_bytes(count: float) -> str:
    """Format bytes as ``1.50 GiB``: three significant digits in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return (
                f"{count:.0f} B"
                if unit == "B"
                else f"{count:.3g} {unit}"
                if count < 1000
                else f"{count:.0f} {unit}"
            )
        count /= 1024
    return f"{count:.3g} TiB" if count < 1000 else f"{count:,.0f} TiB"


def format_count(count: float) -> str:
    """Format a number of parameters or tokens as ``1.35 B``: in thousands, millions, billions."""
    for unit in ("", " K", " M", " B"):
        if abs(count) < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number of things: ``1 document``, ``1,200 documents``."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_seconds(seconds: float) -> str:
    """Format a time as ``850 ms``, ``12.3 s``, ``4 min 05 s``, ``3 h 20 min`` or ``2 d 4 h``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


Interval = tuple[float, float]


def merge(intervals: list[Interval]) -> list[Interval]:
    """Return the union of ``(start, end)`` intervals, in order, none overlapping."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def total(intervals: list[Interval]) -> float:
    """Return the seconds in ``(start, end)`` intervals that do not overlap."""
    return sum(end - start for start, end in intervals)
