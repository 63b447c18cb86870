"""Which updates wait for the next forward pass.

The backward pass has 24 of a step's 26 bytes per parameter to move and, with recomputation, three quarters of its
FLOPs; the forward pass has 2 bytes and a quarter. Where computing and the SSDs take about as long, one of them is idle
in each half of the step, unless some blocks' updates wait for the forward pass. Deferred blocks must lie between the
others: a run of them would only move the waiting (a simulation: 1/8 to 1/4 interleaved gains 7 to 14%, a contiguous
quarter loses it all).
"""

from collections.abc import Callable

from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.resident import evenly_spaced


def interleaved(shape: ModelLayout, fraction: float) -> frozenset[int]:
    """Records whose updates are deferred: ``fraction`` of the blocks, evenly spread; all records if it is 1.

    The blocks are counted from the end of the stack, where the next forward pass leaves the most time.
    """
    if fraction >= 1:
        return frozenset(shape.trainable)
    return frozenset(evenly_spaced(shape.trainable_blocks, round(fraction * len(shape.trainable_blocks))))


def best_fraction(seconds: Callable[[float], float], layers: int) -> float:
    """The fraction of the blocks to defer for the shortest step, found by trying; of equal ones the smallest.

    Args:
        seconds: length of a step with this fraction deferred, simulated.
        layers: number of blocks.
    """
    tried: dict[int, float] = {}

    def step(count: int) -> float:
        if count not in tried:
            tried[count] = seconds(count / layers)
        return tried[count]

    stride = max(1, layers // 16)  # sixteenths first, then single blocks around the best of them
    best = min(range(0, layers // 2 + 1, stride), key=lambda count: (round(step(count), 6), count))
    around = range(max(0, best - stride + 1), best + stride)
    return min(around, key=lambda count: (round(step(count), 6), count)) / layers
