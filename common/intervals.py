"""Intervals of time, for saying how long a resource was busy."""

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
