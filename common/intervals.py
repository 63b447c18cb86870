"""Spans of time, for saying how long a resource was busy."""

Interval = tuple[float, float]


def merge(intervals: list[Interval]) -> list[Interval]:
    """The union of ``(began, ended)`` intervals, in order, none overlapping."""
    result: list[Interval] = []
    for began, ended in sorted(intervals):
        if result and began <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], ended))
        else:
            result.append((began, ended))
    return result


def total(intervals: list[Interval]) -> float:
    """Seconds in ``(began, ended)`` intervals that do not overlap."""
    return sum(ended - began for began, ended in intervals)
