"""Which records live in host memory for the whole run.

Every record is used once per step, in a cyclic order, so it does not matter for the bytes which of them stay; it
matters for when they move. Records outside the blocks come first: the embedding's gradient is complete last and its
parameters are needed first, so nothing hides what its update reads. Of the blocks every so-manieth stays, so that
those which stream are spread over the step.
"""

from collections.abc import Sequence

from fuyou.schedule import StepShape


def spread(blocks: Sequence[int], count: int) -> list[int]:
    """``count`` of ``blocks``, evenly spread, counted from the end of the stack."""
    layers = len(blocks)
    return [blocks[-(-(number + 1) * layers // count) - 1] for number in range(count)]


def resident_records(shape: StepShape, room: int) -> list[int]:
    """Indices of the records whose optimizer states (and low halves) fit in ``room`` bytes together."""
    width, chosen = shape.precision.state_bytes, []
    for record in shape.records:
        if record.outer and record.numel * width <= room:
            chosen.append(record.index)
            room -= record.numel * width
    largest = max(shape.records[index].numel for index in shape.blocks) * width
    return sorted(chosen + spread(shape.blocks, min(len(shape.blocks), room // largest)))
