"""Which updates wait for the next forward pass.

The backward pass has 24 of a step's 26 bytes per parameter to move and, with recomputation, three quarters of its
FLOPs; the forward pass has 2 bytes and a quarter. Where computing and the SSDs take about as long, one of them is idle
in each half of the step, unless some blocks' updates wait for the forward pass. Deferred blocks must lie between the
others: a run of them would only move the waiting (a simulation: 1/8 to 1/4 interleaved gains 7 to 14%, a contiguous
quarter loses it all).
"""

import math

from fuyou.schedule import StepShape


def interleaved(shape: StepShape, fraction: float) -> frozenset[int]:
    """Records whose updates are deferred: ``fraction`` of the blocks, evenly spread; all records if it is 1.

    The blocks are counted from the end of the stack, where the next forward pass leaves the most time.
    """
    if fraction >= 1:
        return frozenset(record.index for record in shape.records)
    layers = len(shape.blocks)
    count = round(fraction * layers)
    return frozenset(shape.blocks[math.ceil((number + 1) * layers / count) - 1] for number in range(count))


def balancing_fraction(compute: tuple[float, float], traffic: tuple[float, float], updates: float) -> float:
    """The fraction to defer for the shortest step, if each half of it takes what its slower resource takes.

    A step takes ``max(Cf, Sf + x U) + max(Cb, Sb - x U)`` seconds. Its minimum is at one of the points where a maximum
    changes sides, or at an end of 0 to 1; of equal points the smallest, since deferring costs memory.

    Args:
        compute: seconds of computation in the forward and in the backward pass, ``(Cf, Cb)``.
        traffic: seconds of SSD traffic (or Adam, if that is slower) in each, with nothing deferred, ``(Sf, Sb)``.
        updates: seconds that the updates of all blocks keep it busy, ``U``.
    """

    def seconds(x: float) -> float:
        return max(compute[0], traffic[0] + x * updates) + max(compute[1], traffic[1] - x * updates)

    points = [0.0, 1.0]
    if updates > 0:
        points += [(compute[0] - traffic[0]) / updates, (traffic[1] - compute[1]) / updates]
    return min(sorted(min(1.0, max(0.0, x)) for x in points), key=lambda x: round(seconds(x), 9))
