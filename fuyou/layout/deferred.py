"""Deferred updates: which of them wait for the next forward pass.

The backward pass has 24 of a step's 26 bytes per parameter to move and, with recomputation, three quarters of its
FLOPs; the forward pass has 2 bytes and a quarter. Where computing and the SSDs take about as long, one of them is idle
in each half of the step, unless some blocks' updates wait for the forward pass. Deferred blocks must lie between the
others: next to each other they would only move the waiting. (In a simulation, deferring 1/8 to 1/4 of the blocks gains
7 to 14% if they are interleaved; with a quarter in one piece, all of it is lost.)
"""

from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.resident import evenly_spaced


def interleaved(shape: ModelLayout, fraction: float) -> frozenset[int]:
    """Return the records whose updates are deferred: ``fraction`` of the blocks, evenly spaced; all records if it is 1.

    The blocks are counted from the end of the stack, where the next forward pass leaves the most time.
    """
    if fraction >= 1:
        return frozenset(shape.trainable)
    return frozenset(evenly_spaced(shape.trainable_blocks, round(fraction * len(shape.trainable_blocks))))
