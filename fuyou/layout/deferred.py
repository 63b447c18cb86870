"""Which updates wait for the next forward pass.

The backward pass has 24 of a step's 26 bytes per parameter to move and, with recomputation, three quarters of its
FLOPs; the forward pass has 2 bytes and a quarter. Where computing and the SSDs take about as long, one of them is idle
in each half of the step, unless some blocks' updates wait for the forward pass. Deferred blocks must lie between the
others: a run of them would only move the waiting (a simulation: 1/8 to 1/4 interleaved gains 7 to 14%, a contiguous
quarter loses it all).
"""

from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.resident import spread


def interleaved(shape: ModelLayout, fraction: float) -> frozenset[int]:
    """Records whose updates are deferred: ``fraction`` of the blocks, evenly spread; all records if it is 1.

    The blocks are counted from the end of the stack, where the next forward pass leaves the most time.
    """
    if fraction >= 1:
        return frozenset(shape.trainable)
    return frozenset(spread(shape.trainable_blocks, round(fraction * len(shape.trainable_blocks))))
