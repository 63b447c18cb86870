"""Resident records: those whose optimizer states stay in host memory for the whole run.

Every record is used once per step, in a cyclic order, so the choice does not change how many bytes move, only when they
move. Records outside the blocks come first: the embedding's gradient is complete last and its parameters are needed
first, so nothing hides what its update reads. Resident blocks are evenly spaced, so that the traffic of the others is
spread over the step.
"""

from collections.abc import Sequence

from fuyou.layout.model_layout import ModelLayout
from fuyou.layout.record import Kind


def evenly_spaced(blocks: Sequence[int], count: int) -> list[int]:
    """Return ``count`` of ``blocks``, evenly spaced, counted from the last block."""
    layers = len(blocks)
    return [blocks[-(-(number + 1) * layers // count) - 1] for number in range(count)]


def resident_records(shape: ModelLayout, room: int) -> list[int]:
    """Return the indices of records, other than adapters, whose optimizer states fit in ``room`` bytes together."""
    chosen = []
    for record in shape.of_kind(Kind.NON_BLOCK):
        if record.trainable and record.state_nbytes <= room:
            chosen.append(record.index)
            room -= record.state_nbytes
    blocks = [record for record in shape.of_kind(Kind.BLOCK) if record.trainable]
    if not blocks:
        return chosen
    count = min(len(blocks), room // max(record.state_nbytes for record in blocks))
    return sorted(chosen + evenly_spaced([record.index for record in blocks], count))
